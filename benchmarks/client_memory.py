"""The memory, time and bytes of a client: the whole model, shards, and narrow networks of the same bytes.

    SHARDING_DATA=FOLDER python benchmarks/client_memory.py [results/client_memory]

Each case trains in a process of its own, on one thread, with the published model, batch and optimizer. `tensors` is
the peak of all its tensors, as `python -m train inspect` counts them; `process` the peak of the process above what it
had before the model, with Python, torch and their kernels loaded; `seconds` the processor's, of the fastest of three
steps. A narrow network is also the part that HeteroFL would send for these bytes. FOLDER holds `minilm/`
(all-MiniLM-L6-v2 in Hugging Face's format), of which only the shapes are read.
"""

import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import torch
from measure import forget_peak, in_new_process, resident, save_rows
from torch import nn

from sharding import Frozen, clip_and_decay, init_empty
from sharding.modules.memory import release_freed_memory
from train.cli.client_memory import client_memory, random_shard
from train.config.schema import Config, load_config
from train.data import empty_dataset
from train.data.dataset import EMPTY, Dataset, Split, default_root
from train.engines import Job
from train.engines.local_training import loss_of, make_optimizer
from train.engines.sequential import resident_model
from train.experiment.assembly import dense_nbytes, first_model, make_model, make_planner

ROOT = Path(__file__).resolve().parents[1]
WIDTHS = {  # by configuration: the option that is the width, its multiples, and the whole width
    "cifar10_resnet18": ("width", 2, 64),
    "cifar100_cct": ("dim", 4, 256),
    "shakespeare_gpt": ("width", 8, 256),
}
RATIOS = dict.fromkeys(WIDTHS, (0.05, 0.1, 0.2, 0.5)) | {"finetune": (0.01, 0.04)}


def configure(name: str, *overrides: str) -> Config:
    """Return a published configuration, with shards of the largest terms, which have as many numbers as others."""
    encoder = [f"model.weights={default_root() / 'minilm'}"] if name == "finetune" else []
    return load_config(ROOT / "configs" / f"{name}.yaml", ["strategy=top_n", "tail=null", *encoder, *overrides])


def dataset_of(config: Config) -> Dataset:
    """Return the configuration's dataset without samples; that of the encoder has 20 classes."""
    if config.data.name != "files":
        return empty_dataset(config.data.name)
    return Dataset("files", EMPTY, EMPTY, 20, (config.data.options["max_length"],))


def server_model(config: Config, dataset: Dataset) -> nn.Module:
    """Return the server's model, with random values; with a residual it has the terms of the strongest client."""
    model = make_model(config, dataset, pretrained=False)
    if config.residual is None:
        return model
    return first_model(config, model, make_planner(config).strategy, RATIOS[config.name])


def random_split(dataset: Dataset, count: int) -> Split:
    """Return random samples of a dataset's shapes, so that no data are needed."""
    rng = torch.Generator().manual_seed(0)
    is_text = len(dataset.input_shape) == 1
    high, dtype = (dataset.num_classes, torch.int64) if is_text else (256, torch.uint8)
    drawn = torch.randint(high, (count, *dataset.input_shape), generator=rng, dtype=dtype)
    predicts_tokens = is_text and dataset.name != "files"
    return Split(drawn, drawn if predicts_tokens else torch.randint(dataset.num_classes, (count,), generator=rng))


def shard_nbytes(name: str, ratio: float) -> int:
    config = configure(name)
    return make_planner(config).nbytes(make_model(config, dataset_of(config)), ratio)


@cache
def nbytes_of_widths(name: str) -> dict[int, int]:
    """Return the bytes of the network of each width."""
    _, step, whole = WIDTHS[name]
    sizes = {}
    for width in range(step, whole + step, step):
        config = configure(name, *of_width(name, width))
        with init_empty():
            sizes[width] = dense_nbytes(make_model(config, dataset_of(config)))
    return sizes


def of_width(name: str, width: int) -> list[str]:
    """Return the overrides of another width; the published ResNet has two channels a group."""
    groups = [f"model.groups={width // 2}"] if name == "cifar10_resnet18" else []
    return [f"model.{WIDTHS[name][0]}={width}", *groups]


def random_frozen(template: Frozen) -> Frozen:
    """Return a frozen part with the names, types and shapes of one on the `meta` device, its matrices in few bits."""
    residuals = {name: torch.full_like(part, 60, device="cpu") for name, part in template.residuals.items()}
    return Frozen(residuals, {name: 0.02 * torch.randn(part.shape) for name, part in template.parameters.items()})


def measure(name: str, checkpoint: bool, kind: str, ratio: float, width: int) -> dict[str, float]:
    """Train a client for some steps in this process."""
    torch.set_num_threads(1)
    overrides = [f"local.checkpoint={str(checkpoint).lower()}", *(of_width(name, width) if width else [])]
    config = configure(name, *overrides, *(["strategy=dense", "residual=null"] if kind != "shard" else []))
    dataset = dataset_of(config)
    steps(config, replace(dataset, test=random_split(dataset, 2)), ratio, 1)  # loads the kernels' code
    dataset = replace(dataset, test=random_split(dataset, config.local.batch_size))
    release_freed_memory()
    before = resident("VmRSS")
    forget_peak()
    seconds = steps(config, dataset, ratio, 4)
    process = resident("VmHWM") - before
    model, planner = server_model(config, dataset), make_planner(config)
    memory = client_memory(planner, model, ratio, ratio, dataset, config.local)
    return {
        "tensors": memory.total,
        "process": process,
        "seconds": min(seconds[1:]),
        "round": 2 * planner.nbytes(model, ratio),
    }


def steps(config: Config, dataset: Dataset, ratio: float, count: int) -> list[float]:
    """Train a client, and return the processor's seconds of each step."""
    with init_empty():
        structure = server_model(config, dataset)
    planner = make_planner(config)
    frozen = random_frozen(planner.frozen(structure))
    shard = random_shard(replace(planner.template(structure, ratio), frozen_digest=frozen.digest))
    model = resident_model(Job(structure, {}, dataset, config.local, 0, frozen=frozen), shard)
    shard.load_into(model)
    optimizer = make_optimizer(model, config.local, 0.01)
    optimizer.register_step_pre_hook(clip_and_decay(model, shard.clip, config.local.decay))
    loss, taken = loss_of(dataset, config.local), []
    for _ in range(count):
        begin = time.process_time()
        optimizer.zero_grad()
        loss(model, (dataset.test.inputs, dataset.test.targets)).backward()
        optimizer.step()
        taken.append(time.process_time() - begin)
    return taken


def cases(names: Sequence[str]) -> list[dict[str, object]]:
    listed: list[dict[str, object]] = []
    for name, checkpoint in product(names, (False, True)):
        whole = WIDTHS[name][2] if name in WIDTHS else 0
        shared = {"model": name, "checkpoint": checkpoint}
        listed.append(shared | {"kind": "whole", "keep_ratio": 1.0, "width": whole})
        for ratio in RATIOS[name]:
            listed.append(shared | {"kind": "shard", "keep_ratio": ratio, "width": whole})
            if name in WIDTHS:
                sizes, nbytes = nbytes_of_widths(name), shard_nbytes(name, ratio)
                width = min(sizes, key=lambda width: abs(sizes[width] - nbytes))
                listed.append(shared | {"kind": "narrow", "keep_ratio": ratio, "width": width})
    return listed


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path, nargs="?", default=ROOT / "results" / "client_memory")
    parser.add_argument("--only", nargs="*", default=list(RATIOS), help="configurations")
    arguments = parser.parse_args()
    rows = []
    for case in cases(arguments.only):
        rows.append(case | in_new_process(measure, *case.values()))
        print(rows[-1], flush=True)
        save_rows(arguments.into / "memory.csv", rows)


if __name__ == "__main__":
    main()
