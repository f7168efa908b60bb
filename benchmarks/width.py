"""Sub-models by width, to compare sharding with: every client trains a window of each layer's channels.

The window moves on every round, as in FedRolex (Alam et al., NeurIPS 2022). (HeteroFL's stays; with equally weak
clients that is plain FedAvg of a narrow model, which `benchmarks/beyond.py` has.) Each entry of the server's model
becomes the mean of those who hold it, weighted by their samples; what nobody holds stays. The width is the largest
whose model has no more bytes than a shard of the configuration's keep ratio; data, cohorts, batches and step sizes are
those of the run beside it. A window holds whole groups of GroupNorm, so that a channel is normalized with the same
others as on the server.

    python benchmarks/width.py CONFIG WHERE [KEY=VALUE …]

writes WHERE/metrics.jsonl, a line a round, as `python -m train run` does; a run that was cut off starts anew.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `train` runs from a checkout

import torch
from torch import Tensor, nn

from train.config import Config, load_config
from train.experiment import Experiment, assemble, make_model, plan_of_each
from train.layout import keep_layout
from train.local import evaluate, train_locally
from train.rounds import step_size

State = Mapping[str, Tensor]


def narrow(config: Config, experiment: Experiment) -> nn.Module:
    """Return the widest ResNet with groups of the same size that costs no more than a shard."""
    (shard,) = plan_of_each(experiment.planner, experiment.model, experiment.keep_ratios).values()
    options = config.model.options
    of_a_group = options["width"] // options["groups"]
    for groups in range(options["groups"], 0, -1):
        small = with_options(config, experiment, {"groups": groups, "width": groups * of_a_group})
        if nbytes(small.state_dict()) <= shard.nbytes:
            return small
    raise SystemExit(f"error: no model of this width is as small as a shard of {shard.nbytes} bytes")


def with_options(config: Config, experiment: Experiment, options: Mapping[str, object]) -> nn.Module:
    """Return the run's model with other options."""
    model = config.model.model_copy(update=options)
    return make_model(config.model_copy(update={"model": model}), experiment.dataset)


def nbytes(state: State) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def windows(full: Tensor, small: Tensor, groups: int, shift: int) -> tuple[Tensor, ...]:
    """Return the indices, one tensor a dimension, of the entries of `full` that `small` holds.

    Args:
        full: a tensor of the server's model.
        small: the same of the client's, no larger in any dimension.
        groups: into which the channels of a layer of the full model fall.
        shift: of the window, in groups.
    """
    places = []
    for size, held in zip(full.shape, small.shape, strict=True):
        start = 0 if held == size else shift % groups * (size // groups)
        places.append((torch.arange(held) + start) % size)
    return torch.meshgrid(*places, indexing="ij")


class Averages:
    """Weighted means of the entries that clients hold."""

    def __init__(self, state: State) -> None:
        self._state = {name: tensor.double() for name, tensor in state.items()}
        self._sums = {name: torch.zeros_like(tensor) for name, tensor in self._state.items()}
        self._weights = {name: torch.zeros_like(tensor) for name, tensor in self._state.items()}

    def add(self, state: State, places: Mapping[str, tuple[Tensor, ...]], weight: float) -> None:
        """Take a client's model in."""
        for name, tensor in state.items():
            self._sums[name][places[name]] += weight * tensor.double()
            self._weights[name][places[name]] += weight

    def state(self) -> dict[str, Tensor]:
        """Return the means, and the old values where nobody had a say."""
        return {
            name: torch.where(self._weights[name] > 0, sums / self._weights[name].clamp(min=1e-300), self._state[name])
            for name, sums in self._sums.items()
        }


def run(config: Config, into: Path) -> None:
    """Train as configured, with windows in the place of shards."""
    experiment = assemble(config)
    model, groups = experiment.model, int(config.model.options["groups"])
    small = keep_layout(narrow(config, experiment))
    cost = nbytes(small.state_dict())
    into.mkdir(parents=True, exist_ok=True)
    with (into / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for t in range(config.rounds):
            losses, cohort = train_round(experiment, small, t, groups)
            line = {"round": t, "train_loss": losses, "bytes_down": cost * cohort, "bytes_up": cost * cohort}
            line |= {"clients": cohort, "heard": cohort}
            if config.evaluates(t):
                dataset = experiment.dataset
                line["test_accuracy"], line["test_loss"] = evaluate(model, dataset, dataset.test)
                print(f"round {t + 1} of {config.rounds}: {100 * line['test_accuracy']:.1f} %", flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()


def train_round(experiment: Experiment, small: nn.Module, t: int, groups: int) -> tuple[float, int]:
    """Train round `t`, with windows shifted by as many groups; return the clients' mean loss and how many they were."""
    config, job, model = experiment.config, experiment.job, experiment.model
    cohort, full = experiment.sampler.invite(t), model.state_dict()
    places = {name: windows(full[name], held, groups, t) for name, held in small.state_dict().items()}
    averages, losses, lr = Averages(full), 0.0, step_size(config, t)
    for client in cohort:
        small.load_state_dict({name: full[name][where] for name, where in places.items()})
        key = (config.seed, t, client)
        losses += float(train_locally(small, job.clients[client], job.dataset, job.local, lr, None, key))
        averages.add(small.state_dict(), places, experiment.num_samples[client])
    model.load_state_dict(averages.state())
    return losses / len(cohort), len(cohort)


def main(words: Sequence[str]) -> None:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("into", type=Path, metavar="WHERE")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_intermixed_args(words)
    torch.set_num_threads(1)
    run(load_config(args.config, args.overrides), args.into)


if __name__ == "__main__":
    main(sys.argv[1:])
