"""The generated tables of the documentation, from the Markdown, CSV and JSON in `results/`."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from train.report.text import NOTHING, frame_table, markdown_table

RESULTS = Path(__file__).parents[1] / "results"
CIFAR = "CIFAR-10 (re-encoded)"  # lossy WebP, not the official images

Table = Callable[[], str]


def columns_table(frame: pd.DataFrame, columns: Mapping[str, str], left: int = 1) -> str:
    """Return some columns of a frame as a table, by their new names; the first `left` are text.

    A column may have a format, as in ``seconds:.1f``. Missing numbers are dashes.
    """
    table = {}
    for name, column in columns.items():
        key, _, form = column.partition(":")
        table[name] = [NOTHING if value != value else format(value, form) for value in frame[key]]  # noqa: PLR0124
    return frame_table(pd.DataFrame(table), left)


def measured(path: str, *keys: str) -> pd.DataFrame:
    """Return the cases of a benchmark's file in JSON, by `name`, with the keys of inner objects joined by dots.

    `keys` lead to the object of all cases.
    """
    content = json.loads((RESULTS / path).read_text(encoding="utf-8"))
    for key in keys:
        content = content[key]
    return pd.json_normalize([{"name": name} | case for name, case in content.items() if isinstance(case, dict)])


# Studies


def last_table(study: str) -> pd.DataFrame:
    """Return the last table in the summary of a study or a comparison, its cells as they are written there."""
    text = (RESULTS / study / "summary.md").read_text(encoding="utf-8")
    *_, table = (block for block in text.split("\n\n") if block.startswith("| "))
    header, _, *rows = (line[2:-2].split(" | ") for line in table.splitlines())
    return pd.DataFrame(rows, columns=header)


def excerpt(columns: Mapping[str, str], *studies: str, without: str | None = None, left: int = 1) -> Table:
    """Return the table of columns of studies' last tables, without rows that have `without` in the first cell."""

    def table() -> str:
        rows = pd.concat(map(last_table, studies))
        return columns_table(rows[~rows.iloc[:, 0].str.contains(without)] if without else rows, columns, left)

    return table


def same(*names: str) -> dict[str, str]:
    """Return columns that keep their names."""
    return {name: name for name in names}


def uploads(study: str, target: str) -> Table:
    """Return the table of the bits that few uploads need to reach a test accuracy."""
    columns = same("uploads", f"rounds to {target}") | {"Mbit up": f"Mbit to {target}", "of full": f"of full, {target}"}
    return excerpt(columns | {"Mbit both ways": f"to {target}, both ways"} | same("last accuracy, %", "α"), study)


def quickstart() -> str:
    """Return the quickstart's accuracy with the published algorithm and with the defaults."""
    published = last_table("quickstart_published")
    table = last_table("quickstart_seeds").merge(published, on="strategy", suffixes=("", ", published"))
    columns = {"digits, 50 rounds, 4 seeds": "strategy", "published algorithm": "test accuracy, published"}
    return columns_table(table, columns | {"our options": "test accuracy"} | same("of dense FedAvg's bytes"))


SEEDS, COSTS, QUARTERS = same("rounds", "seeds"), same("rounds", "GB", "seeds"), same("25 %", "50 %", "75 %")
CURVE, FIRST, BASE = QUARTERS | {"end, %": "end"}, "end minus the first", "minus base, by seed"
OPTIONS = {f"{CIFAR}, r = 0.1": "options", **SEEDS, **QUARTERS, "end": "end", "last model": "end, last model"}
LONG = {f"{CIFAR}, r = 0.1, seed 0": "arm", **same("rounds", "GB"), **CURVE, "last model": "end, last model"}
FINE_TUNING = same("setting", "method", "lr", "seeds", "MB", "without first contacts", "memory, MB", "accuracy, %")
WIRE = {"quickstart, 4 seeds": "strategy", "accuracy": "test accuracy", **same("of dense FedAvg's bytes", "MB to 80 %")}

EXCERPTS: Mapping[str, Table] = {
    "beyond": excerpt(
        {f"{CIFAR}, r = 0.1": "method", **SEEDS, **CURVE, "minus `collective`": "end minus collective"},
        "beyond",
        without="scaled",
    ),
    "options": excerpt({**OPTIONS, "minus the first": FIRST}, "options", without="scaled"),
    "narrow": excerpt(
        {f"{CIFAR}, our recipe": "options", **COSTS, **CURVE, "minus shards": FIRST},
        *("narrow_fifth", "narrow_tenth"),
        without="zero_init_last",
    ),
    "trials": excerpt({f"{CIFAR}, r = 0.2": "arm", **COSTS, **CURVE, "minus its base, by seed": BASE}, "trials"),
    "four_epochs": excerpt(
        {f"{CIFAR}, four local epochs": "options", **COSTS, **CURVE, "minus shards": FIRST}, "four_epochs"
    ),
    "long_run": excerpt({**LONG, "best": "best", "after round": "after", "minus cosine": BASE}, "long_run"),
    "uneven": excerpt({f"{CIFAR}, r = 0.2 and 0.4": "options", **COSTS, **CURVE, "minus `top_n`": FIRST}, "uneven"),
    "central": excerpt(
        {f"{CIFAR}, all samples in one place": "options", "rounds of 160 steps": "rounds", **same("seeds"), **CURVE},
        "central",
    ),
    "wire": excerpt(WIRE, "wire"),
    "finetune": excerpt(FINE_TUNING | same("minus ours"), "finetune", left=2),
    "finetune_vision": excerpt(FINE_TUNING | same("minus ours"), "finetune_vision", left=2),
    "cifar100_uploads": uploads("cifar100_uploads", "6 %"),
    "joint_sampling": uploads("joint_sampling", "85 %"),
}


# Benchmarks


def engines() -> str:
    """Return the table of benchmarks/cohort.py, as far as it was run."""
    cases = measured("engines/cohort.json").dropna(subset="times_sequential.processes")
    cases["base"] = cases[["seconds_per_round.sequential", "seconds_per_round.sequential_1_thread"]].min(axis=1)
    columns = {"workload": "name", "sequential, s": "base:.2f", "processes, s": "seconds_per_round.processes:.2f"}
    columns |= {"times faster": "times_sequential.processes:.2f", "sequential, MB": "peak_memory_mb.sequential:.0f"}
    return columns_table(cases, columns | {"processes, MB": "peak_memory_mb.processes:.0f"})


def peers() -> str:
    """Return the table of benchmarks/peers.py."""
    columns = {"simulator": "name", "seconds a round": "seconds_per_round:.2f", "slowest": "slowest_round:.2f"}
    columns |= {"times plain": "times_plain:.2f", "peak MB": "peak_memory_mb:.0f"}
    return columns_table(measured("engines/peers.json", "simulators"), columns)


def cluster() -> str:
    """Return the table of benchmarks/cohort.py on Ray clusters; seconds are only there if the machine was quiet."""
    content = json.loads((RESULTS / "engines" / "cluster.json").read_text(encoding="utf-8"))
    cases = pd.DataFrame(
        {"case": case, "nodes": nodes} | values
        for case, by_nodes in content.items()
        for nodes, values in by_nodes.items()
    ).reindex(columns=["case", "nodes", "seconds", "head_mb", "worker_mb"])
    columns = {"clients a round": "case", "nodes": "nodes", "seconds a round": "seconds:.1f"}
    return columns_table(cases, columns | {"head, MB": "head_mb:.0f", "worker, MB": "worker_mb:.0f"})


def planner() -> str:
    """Return the table of benchmarks/planner.py."""
    cases = measured("planner/planner.json").query("name in ('unbiased', 'collective')")
    cases["reference"] = cases.reference_svd + cases.reference_r_draw
    phases = ["spectra", "inclusion", "fit", "draw", "plan"]
    cases[[*phases, "reference"]] *= 1e3
    columns = {"milliseconds": "name"} | dict(zip(("spectra", "π", "fit", "draw", "whole plan"), phases, strict=True))
    columns = {name: column if column == "name" else f"{column}:.1f" for name, column in columns.items()}
    return columns_table(cases, columns | {"reference": "reference:.0f", "ratio": "ratio:.1f"})


def scale() -> str:
    """Return the table of benchmarks/scale.py."""
    names = {
        "block": "one block of width 1024",
        "blocks": "six blocks of width 1024",
        "resnet18": "ResNet-18",
        "vit_b": "ViT-B",
        "gpt2_medium": "GPT-2 medium",
        "llama": "Llama-shaped decoder",
        "gpt2_medium_int4": "GPT-2 medium, factors on int4",
        "llama_int4": "Llama-shaped decoder, factors on int4",
    }
    cases = pd.read_csv(RESULTS / "scale" / "scale.csv", dtype={"plan_seconds": str, "aggregate_seconds": str})
    cases = cases.assign(
        model=cases.model.map(names), parameters=cases.parameters / 1e6, megabytes=cases.client_bytes / 1e6
    )
    columns = {"model": "model", "million parameters": "parameters:.0f", "MB a client": "megabytes:.0f"}
    columns |= {"plan, s": "plan_seconds", "average, s": "aggregate_seconds", "plan": "plan_peak:.1f"}
    return columns_table(cases, columns | {"round": "round_peak:.1f", "client, one step": "client_step_peak:.1f"})


def client_memory() -> str:
    """Return the table of benchmarks/client_memory.py, each size as it is and with checkpointed blocks."""
    names = {"cifar10_resnet18": "ResNet-18", "cifar100_cct": "CCT", "shakespeare_gpt": "GPT", "finetune": "MiniLM"}
    cases = pd.read_csv(RESULTS / "client_memory" / "memory.csv")
    rows = []
    for (model, ratio, kind), pair in cases.groupby(["model", "keep_ratio", "kind"], sort=False):
        plain, checkpointed = (pair[pair.checkpoint == flag].iloc[0] for flag in (False, True))
        width = f"narrow, {plain.width} of {cases[cases.model == model].width.max()}"
        label = {"whole": "whole", "shard": f"r = {ratio:g}", "narrow": width}[kind]
        sizes = (f"{case[what] / 1e6:,.0f}" for what in ("tensors", "process") for case in (plain, checkpointed))
        seconds = (f"{case.seconds:.2f}" for case in (plain, checkpointed))
        rows.append((names[model], label, f"{plain['round'] / 1e6:.1f}", *sizes, *seconds))
    measures = (part for what in ("tensors, MB", "process, MB", "s a step") for part in (what, "checkpointed"))
    return markdown_table(("", "client", "MB a round", *measures), rows, 2)


PARTS: Mapping[str, Table] = EXCERPTS | {
    part.__name__: part for part in (quickstart, client_memory, engines, peers, cluster, planner, scale)
}
