"""Trials of changes to our recipe that are not options of the program, at the medium scale of the CIFAR-10 column.

- `trials`: r = 0.2, 100 rounds, seeds 1000 and 1001; each change at the bytes of the arm that it changes.
- `long_run`: r = 0.1, 1,000 rounds, seed 0: what the end of a long run loses, an end without a falling rate, and
  whether the narrow network of the same bytes stays ahead when its capacity may bind.

Rules, set before the runs:

- Rates are those that the trials of `studies/narrow.py` chose before: 0.01 for shards and 0.02 for the narrow network
  at r = 0.2, 0.02 and 0.03 at r = 0.1; local epochs divide the rate by the root of their number.
- A change is kept if it ends more than one point ahead of its base on both seeds; without such a gain on the first seed
  the second need not run. A change that is kept runs at full length on three seeds before it becomes part of the
  recipe. More epochs are kept only if the narrow network gains less by them.
- "rank n" closes the question of the server's rank without a run of its own if in the base the energy beyond n is below
  half a percent and the cut of the average ends within 0.3 points of the average.
- `long_run`: the default loses its end if its average ends more than half a point below its best evaluation of the
  first two thirds. Then the last model takes its place if that ends half a point ahead of the average, or else the
  constant rate with the average of the last half if that ends half a point ahead of both. Between shards and the narrow
  network less than a point says nothing, for it is one seed.
- Every arm, finished or not, is shown.

On one core 100 rounds with shards take about 8 minutes, all of `trials` 4.2 hours and `long_run` 3.5.

    python -m studies trials --only 'r = 0.2' 'rank n'
    python -m studies long_run
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import pandas as pd
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sharding import (
    Budget,
    FactorizedLayer,
    Shard,
    ShardPlanner,
    Update,
    UserError,
    factorize,
    iterate_average,
)
from sharding.factorization import ENDS
from sharding.layers.decomposition import form_of
from sharding.rounds.optim import factorized_layers
from sharding.rounds.plan import Client, Draw
from sharding.terms.strategies import LayerContext, num_terms
from studies.beyond import course, narrow_network
from studies.changes import Change, Measures, run_all, unchanged
from studies.curves import by_scheme, ends
from studies.picture import draw
from studies.runner import CONFIGS, Arguments, configs_of, curves_of, folder, kept_curves, write_summary
from train.config.schema import Config
from train.engines.engine import Reply
from train.engines.sequential import SequentialEngine
from train.experiment.assembly import make_model, make_server
from train.experiment.evaluation import evaluate
from train.experiment.experiment import Experiment
from train.report.text import NOTHING, frame_table
from train.rundir.file_names import MODEL_FILE

# Of a curve: accuracy of the average, of the last model and of the average cut to rank n; ‖W‖² beyond rank n, a share.
COLUMNS = ("rounds", "bytes_up", "bytes_down", "test_accuracy", "last_accuracy", "cut_accuracy", "beyond_n")
GAIN = 1.0  # points on every seed for which a change is kept


def terms_of(experiment: Experiment) -> dict[str, int]:
    """Return n of each sharded layer for the largest keep ratio of a client."""
    layers, ratio = experiment.server.planner.sharded_layers(experiment.model), max(experiment.keep_ratios.values())
    return {name: num_terms(form_of(layer).rank, ratio) for name, layer in layers.items()}


@torch.no_grad()
def cut(model: nn.Module, ranks: Mapping[str, int]) -> float:
    """Cut the weights of these layers to their n largest terms, in place; return the share of ‖W‖² that was beyond."""
    beyond, total = 0.0, 0.0
    for name, n in ranks.items():
        weight = model.get_submodule(name).get_parameter("weight")
        left, magnitudes, right = torch.linalg.svd(weight.flatten(1).double(), full_matrices=False)
        squares = magnitudes.square()
        beyond, total = beyond + float(squares[n:].sum()), total + float(squares.sum())
        weight.copy_(((left[:, :n] * magnitudes[:n]) @ right[:n]).view(weight.shape))
    return beyond / total


def ranks_measured(experiment: Experiment) -> Measures:
    """Measure what the server's model has beyond rank n, and the accuracy of the average without it."""
    ranks = terms_of(experiment)

    def cut_accuracy() -> float:
        result = deepcopy(experiment.result)
        cut(result, ranks)
        return evaluate(result, experiment.dataset, experiment.dataset.test)[0]

    return {"beyond_n": lambda: cut(deepcopy(experiment.model), ranks), "cut_accuracy": cut_accuracy}


def server_at_rank_n(experiment: Experiment) -> Measures:
    """Cut the server's model to rank n after each step; its momentum stays as it is."""
    ranks, optimizer, beyond = terms_of(experiment), experiment.server.optimizer, [0.0]
    assert optimizer is not None

    def cut_model(*_: object) -> None:
        beyond[0] = cut(experiment.model, ranks)

    optimizer.register_step_post_hook(cut_model)
    return {**ranks_measured(experiment), "beyond_n": lambda: beyond[0]}


@dataclass(frozen=True, eq=False)
class OneSide(Update):
    """An update of which the server has one side of all terms already, so that it is not sent."""

    not_sent: ClassVar[str]

    @property
    def nbytes(self) -> int:
        """The bytes without that side."""
        side = self.not_sent
        terms = {layer: replace(each, **{side: getattr(each, side)[:, :0]}) for layer, each in self.terms.items()}
        return Update(**vars(self) | {"terms": terms}).nbytes


class OnlyU(OneSide):
    """An update of u."""

    not_sent = "v"


class OnlyV(OneSide):
    """An update of v."""

    not_sent = "u"


class OneFactor(SequentialEngine):
    """Clients train u in odd rounds and v in even ones, from 0; the other side stays as it was sent."""

    def train_client(self, client: Client, shard: Shard, round: int, lr: float) -> Reply:
        """Train one client on its shard."""
        for layer in factorized_layers(self.resident(shard)):
            layer.u.requires_grad_(round % 2 == 1)
            layer.v.requires_grad_(round % 2 == 0)
        reply = super().train_client(client, shard, round, lr)
        kind = OnlyU if round % 2 else OnlyV
        return reply if reply.update is None else replace(reply, update=kind(**vars(reply.update)))


def one_factor(experiment: Experiment) -> Measures:
    """Let clients train one factor a round."""
    experiment.make_engine = OneFactor
    return {}


class RankPlanner(ShardPlanner):
    """Plans shards with a number of terms for each layer; layers without one are sent whole.

    Args:
        config: of the run.
        ranks: n by layer.
        whole: layers to send whole, beside the first and the last.
    """

    def __init__(self, config: Config, ranks: Mapping[str, int], whole: Iterable[str]) -> None:
        formats: dict[str, Any] = {"compression": config.compression, "tail_format": config.tail}
        super().__init__(
            config.strategy, config.design, config.seed, (*ENDS, *whole), clip=config.local.clip, **formats
        )
        self.ranks = ranks

    def _draw(self, layer: str, context: LayerContext, clients: list[Client], round: int) -> Draw:
        return super()._draw(layer, context._replace(num_terms=self.ranks[layer]), clients, round)


def with_ranks(experiment: Experiment, ranks: Mapping[str, int]) -> Measures:
    """Start from these ranks, and plan shards of them; other layers are whole."""
    config, whole = experiment.config, terms_of(experiment).keys() - ranks.keys()
    model = make_model(config, experiment.dataset).to(experiment.job.device)
    cut(model, ranks)
    experiment.server = make_server(config, model, RankPlanner(config, ranks, sorted(whole)))
    experiment.job = replace(experiment.job, model=model)
    return {}


def early_whole(stages: int) -> Change:
    """Return a change that sends the first stages whole, and takes their bytes from the terms of the last stage."""

    def change(experiment: Experiment) -> Measures:
        ranks, layers = terms_of(experiment), experiment.server.planner.sharded_layers(experiment.model)
        last = f"stages.{len(experiment.model.get_submodule('stages')) - 1}."  # type: ignore[arg-type]
        whole = [name for name in ranks if name.startswith(tuple(f"stages.{stage}." for stage in range(stages)))]
        sizes = {name: form.rows + form.columns for name, layer in layers.items() for form in [form_of(layer)]}
        price = sum(layers[name].get_parameter("weight").numel() - ranks[name] * sizes[name] for name in whole)
        paying = [name for name in ranks if name.startswith(last)]
        left = 1 - price / sum(ranks[name] * sizes[name] for name in paying)
        fewer = {name: round(ranks[name] * left) for name in paying}
        return with_ranks(experiment, {name: fewer.get(name, n) for name, n in ranks.items() if name not in whole})

    return change


def ranks_from_spectra(experiment: Experiment) -> Measures:
    """Buy the terms that hold most of what dense training changes, for the parameters of a shard.

    Raises:
        UserError: the run of `PILOT` with this seed is not there.
    """
    config, dataset = experiment.config, experiment.dataset
    path = config.directory.parent / f"{folder(PILOT)}-{config.seed}" / MODEL_FILE
    if not path.exists():
        raise UserError(f"{path} is not there; run the arm '{PILOT}' with this seed first")
    model, trained = make_model(config, dataset), load_file(path)
    shard = factorize(model, max(experiment.keep_ratios.values()))
    model.load_state_dict({name: trained[name] - value for name, value in model.state_dict().items()})
    chosen = factorize(model, Budget(sum(part.numel() for part in shard.parameters())))
    named = dict(chosen.named_modules())
    ranks = {name: part.num_terms for name, part in named.items() if isinstance(part, FactorizedLayer)}
    return with_ranks(experiment, ranks)


def average_of_last_half(experiment: Experiment) -> Measures:
    """Evaluate the plain average of the models of the last half of the rounds; before, the last model."""
    average, half = iterate_average(experiment.model), experiment.config.rounds // 2

    def toward(averages: Sequence[Tensor], parameters: Sequence[Tensor], rounds: Tensor | int) -> None:
        torch._foreach_lerp_(list(averages), list(parameters), 1 / max(1.0, float(rounds) + 1 - half))

    average.multi_avg_fn = toward
    experiment.server.averaged = average
    return {}


class Trial(NamedTuple):
    """An arm.

    Attributes:
        overrides: of the study's configuration.
        base: the arm that it is compared with; empty for none.
        change: of the program.
    """

    overrides: Sequence[str]
    base: str = ""
    change: Change = unchanged


class TrialStudy(NamedTuple):
    """Arms that are compared.

    Attributes:
        title: of the table.
        seeds: of every arm.
        overrides: of configs/beyond.yaml, for all arms.
        arms: by name.
    """

    title: str
    seeds: Sequence[int]
    overrides: Sequence[str]
    arms: Mapping[str, Trial]


def shards(change: Change = unchanged, epochs: int = 1, rounds: int = 100, base: str = "r = 0.2") -> Trial:
    """Return an arm of shards; more local epochs divide the rate by the root of their number."""
    return Trial(("keep_ratio=0.2", f"rounds={rounds}", *local(epochs, 0.01)), base, change)


def narrow(epochs: int = 1, base: str = "narrow") -> Trial:
    """Return an arm of the narrow network, for the bytes of 100 rounds with shards."""
    return Trial((*narrow_network(16), "rounds=96", *local(epochs, 0.02)), base)


def local(epochs: int, lr: float) -> tuple[str, str]:
    """Return the overrides of clients that train for some epochs, of the rate for one epoch."""
    return f"local.epochs={epochs}", f"local.optimizer.lr={lr / epochs**0.5:.4g}"


PILOT = "dense pilot"
EXPERIMENTS = {
    "trials": TrialStudy(
        "CIFAR-10 (re-encoded), medium scale, r = 0.2",
        (1000, 1001),
        ("recipe=tuned",),
        {
            "r = 0.2": shards(ranks_measured, base=""),
            "narrow": narrow(base=""),
            "rank n": shards(server_at_rank_n),
            "one factor": shards(one_factor, rounds=133),
            "stage 1 whole": shards(early_whole(1)),
            "stages 1 and 2 whole": shards(early_whole(2)),
            PILOT: Trial(("strategy=dense", "rounds=50", *local(1, 0.03))),
            "ranks from spectra": shards(ranks_from_spectra),
            "2 epochs": shards(epochs=2),
            "narrow, 2 epochs": narrow(epochs=2),
            "4 epochs": shards(epochs=4),
            "narrow, 4 epochs": narrow(epochs=4),
        },
    ),
    "long_run": TrialStudy(
        "CIFAR-10 (re-encoded), medium scale, r = 0.1",
        (0,),
        ("recipe=tuned", "keep_ratio=0.1", "rounds=1000", "local.optimizer.lr=0.02"),
        {
            "cosine": Trial(()),
            "constant, last half": Trial(("local.schedule=constant",), "cosine", average_of_last_half),
            "narrow": Trial((*narrow_network(12), "rounds=876", *local(1, 0.03)), "cosine"),
        },
    ),
}


def run(study: TrialStudy, arguments: Arguments) -> None:
    """Run what is missing, arm by arm, and write a table of all arms that have runs after each."""
    if unknown := set(arguments.only or ()) - set(study.arms):
        raise UserError(f"--only: {', '.join(sorted(unknown))} is not among {', '.join(study.arms)}")
    chosen = [name for name in study.arms if arguments.only is None or name in arguments.only]
    for name in chosen:
        trial = study.arms[name]
        schemes = {name: [*study.overrides, *trial.overrides, *arguments.overrides]}
        configs = configs_of(CONFIGS / "beyond.yaml", schemes, arguments.seeds or study.seeds, arguments.into)
        curves_of(configs, arguments, columns=COLUMNS, run=partial(run_trial, trial.change))
        write_table(study, arguments)
    if not chosen:
        write_table(study, arguments)


def run_trial(change: Change, configs: Mapping[str, Config], *_: object) -> pd.DataFrame:
    """Run what is missing of an arm, and return its curves with all columns."""
    return run_all(change, configs).reindex(columns=["run", *COLUMNS])


def write_table(study: TrialStudy, arguments: Arguments) -> None:
    """Write the summary of all runs that have a curve."""
    curves = by_scheme(kept_curves(arguments, columns=COLUMNS))
    curves = curves.assign(gigabytes=curves.bytes_total / 1e9)
    picture = draw(curves, {"GB down and up": "gigabytes"}, study.title) if len(curves) else None
    write_summary(arguments, [f"# Trials: {study.title}", "", frame_table(table(study, curves))], picture)


def table(study: TrialStudy, curves: pd.DataFrame) -> pd.DataFrame:
    """Return a row per arm that has runs: its course, other models than the average, and its gain seed by seed."""
    rows = []
    for name, trial in study.arms.items():
        runs = curves[curves.scheme == name]
        if runs.empty:
            continue
        last = ends(runs)
        gains = gains_of(runs, curves[curves.scheme == trial.base])
        best = runs.loc[runs.groupby("run").test_accuracy.idxmax()]
        is_done = {*study.seeds} <= {*gains.index}
        rows.append(
            {"arm": name}
            | course(runs, ".2f")
            | {
                "end, last model": percents(last.last_accuracy),
                "end, cut to n": percents(last.cut_accuracy),
                "beyond n, %": percents(last.beyond_n, ".2f"),
                "best": percents(best.test_accuracy),
                "after": ", ".join(f"{rounds:.0f}" for rounds in best.rounds),
                "minus base, by seed": ", ".join(f"{gain:+.1f}" for gain in gains) or NOTHING,
                "more than a point": "no" if (gains <= GAIN).any() else "yes" if is_done else NOTHING,
            }
        )
    return pd.DataFrame(rows)


def gains_of(runs: pd.DataFrame, base: pd.DataFrame) -> pd.Series:
    """Return the differences of the last accuracies to the base, in points, by seed."""
    accuracies, of_base = (ends(each).set_index("seed").test_accuracy for each in (runs, base))
    return (100 * (accuracies - of_base)).dropna()


def percents(values: pd.Series, form: str = ".1f") -> str:
    """Return a share of each seed, in %."""
    return ", ".join(f"{100 * value:{form}}" for value in values.dropna()) or NOTHING
