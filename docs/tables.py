"""The generated tables of the documentation, from the files in `results/`."""

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from studies.beyond import difference
from studies.curves import by_seed, read_curves
from studies.options import Point
from train.report.text import mean_and_spread

RESULTS = Path(__file__).parents[1] / "results"
NOTHING = "–"
CIFAR = "CIFAR-10 (re-encoded)"  # lossy WebP, not the official images
SETUPS = {"wireless_logistic": "Setup 1", "wireless": "Setup 2", "wireless_mnist": "Setup 3"}

Table = Callable[[], Iterator[str]]


def head(*columns: str, left: int = 1) -> Iterator[str]:
    """Yield the head of a table: the first `left` columns are text, the others are numbers."""
    yield row(*columns)
    yield "|" + "---|" * left + "---:|" * (len(columns) - left)


def row(*cells: object) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def summary(study: str, number: int = 0) -> list[list[str]]:
    """Return the cells of a table of a study's summary, without its head."""
    lines = (RESULTS / study / "summary.md").read_text(encoding="utf-8").splitlines()
    tables: list[list[list[str]]] = []
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("|"):
            if not before.startswith("|"):
                tables.append([])
            tables[-1].append([cell.strip() for cell in line.split("|")[1:-1]])
    return tables[number][2:]


def without_scaled(study: str, number: int = 0) -> list[list[str]]:
    """Return `summary` without the rows of scaled steps, which have a table of their own."""
    return [cells for cells in summary(study, number) if "scaled" not in cells[0]]


def chosen(columns: Mapping[str, int], *rows: Sequence[str], left: int = 1) -> Iterator[str]:
    """Yield a table of these columns, by their new names, of some rows; the first `left` are text."""
    yield from head(*columns, left=left)
    yield from (row(*(cells[place] for place in columns.values())) for cells in rows)


# Accuracy at equal cost


def beyond() -> Iterator[str]:
    """Yield the table of studies/beyond.py on CIFAR-10."""
    columns = {f"{CIFAR}, r = 0.1": 0, "rounds": 1, "seeds": 3, "25 %": 4, "50 %": 5, "75 %": 6, "end, %": 7}
    yield from chosen(columns | {"minus `collective`": 9}, *without_scaled("beyond"))


def beyond_shakespeare() -> Iterator[str]:
    """Yield the methods on Shakespeare, and our options at their best rate, beside `top_n` as published."""
    columns = {"Shakespeare, r = 0.1": 0, "seeds": 3, "25 %": 4, "50 %": 5, "75 %": 6, "end, %": 7}
    runs = by_seed(read_curves(RESULTS / "beyond_shakespeare" / "curves.csv"))
    ours = by_seed(read_curves(RESULTS / "options_shakespeare" / "curves.csv", Point))
    rows = [*without_scaled("beyond_shakespeare"), *without_scaled("options_shakespeare", 1)]
    compared = ([*its[:9], difference((runs | ours)[its[0]], runs["top_n"])] for its in rows)
    yield from chosen(columns | {"minus `top_n`": 9}, *compared)


def uneven() -> Iterator[str]:
    """Yield strategies and smaller models for uneven clients, each at its best rate."""
    columns = {f"{CIFAR}, r = 0.2 and 0.4": 0, "rounds": 1, "GB": 2, "seeds": 3, "25 %": 4, "50 %": 5, "75 %": 6}
    yield from chosen(columns | {"end, %": 7, "minus `top_n`": 9}, *summary("uneven", 1))


def quickstart() -> Iterator[str]:
    """Yield the quickstart's accuracy with the published algorithm and with the defaults."""
    published = {cells[0]: cells[1] for cells in summary("quickstart_published")}
    yield from head("digits, 50 rounds, 4 seeds", "published algorithm", "our options", "of dense FedAvg's bytes")
    for name, accuracy, *_, share, _ in summary("quickstart_seeds"):
        yield row(name, published[name], accuracy, share)


def wire() -> Iterator[str]:
    """Yield what numbers of fewer bits cost in accuracy and save in bytes."""
    columns = {"quickstart, 4 seeds": 0, "accuracy": 1, "of dense FedAvg's bytes": -2, "MB to 80 %": -1}
    yield from chosen(columns, *summary("wire"))


def wires() -> Iterator[str]:
    """Yield what each wire loses, over pairs of equal strategy and seed, and its share of the bytes."""
    rows = _rows("wire/summary.csv")
    runs = {(its["settings"].removeprefix("compression="), its["strategy"], its["seed"]): its for its in rows}
    yield from head("minus float32", "pairs", "points", "of its bytes")
    for name in ("bfloat16", "int8"):
        pairs = [(its, runs["float32", *which]) for (kind, *which), its in runs.items() if kind == name]
        gaps = [100 * (float(ours["test_accuracy"]) - float(theirs["test_accuracy"])) for ours, theirs in pairs]
        shares = [100 * float(ours["megabytes"]) / float(theirs["megabytes"]) for ours, theirs in pairs]
        error = stdev(gaps) / len(gaps) ** 0.5
        yield row(name, len(gaps), f"{fmean(gaps):+.1f} ± {error:.1f}", f"{min(shares):.0f}–{max(shares):.0f} %")


def wire_options() -> Iterator[str]:
    """Yield the quickstart on int8 with the defaults, and with twice the terms."""
    columns = {"`compression=int8`": 0, "accuracy": 1, "of dense FedAvg's bytes": -2}
    named = {"our options": "wire_int8", "published, twice the terms": "wire_more_terms"}
    rows = ([f"{cells[0]}, {name}", *cells[1:]] for name, study in named.items() for cells in summary(study))
    yield from chosen(columns, *rows)


def options() -> Iterator[str]:
    """Yield each set of options at its best rate."""
    columns = {f"{CIFAR}, r = 0.1": 0, "rounds": 1, "seeds": 3, "25 %": 4, "50 %": 5, "75 %": 6, "end": 7}
    yield from chosen(columns | {"last model": 8, "minus the first": 9}, *without_scaled("options", 1))


def options_gains() -> Iterator[str]:
    """Yield what all options gain over the methods of studies/beyond.py that move the same bytes."""
    ours = by_seed(read_curves(RESULTS / "options" / "curves.csv", Point))["low_rank, nesterov, lr 0.02"]
    others = by_seed(read_curves(RESULTS / "beyond" / "curves.csv"))
    yield from head("low_rank, nesterov, average, lr 0.02, minus", "seeds", "points at the end")
    for name in ("collective", "collective, nesterov", "narrow, equal bytes", "narrow, equal bytes, nesterov"):
        shared = ", ".join(str(seed) for seed in ours if seed in others[name])
        yield row(name, shared, difference(ours, others[name]))


def scaled() -> Iterator[str]:
    """Yield the published step of a client and a scaled one, each at its best rate, with our other options."""
    yield from head("all options", "seeds", "published step", "its rate", "scaled step", "its rate", "difference")
    for name, study, ours, others in (
        ("CIFAR-10, `collective`", "options", "low_rank, nesterov, lr 0.02", "low_rank, nesterov, scaled, lr 0.03"),
        ("digits, `collective`", "options_digits", "sgd, lr 0.02", "scaled_sgd, lr 0.02"),
        (
            "Shakespeare, `top_n`",
            "options_shakespeare",
            "top_n, low_rank, nesterov, lr 0.1",
            "top_n, low_rank, nesterov, scaled, lr 0.05",
        ),
    ):
        runs = by_seed(read_curves(RESULTS / study / "curves.csv", Point))
        steps = [runs[arm] for arm in (ours, others)]
        seeds = sorted(steps[0].keys() & steps[1].keys())
        ends = (mean_and_spread([100 * its[seed][-1].test_accuracy for seed in seeds]) for its in steps)
        rates = (arm.rpartition(" ")[2] for arm in (ours, others))
        cells = (cell for pair in zip(ends, rates, strict=True) for cell in pair)
        yield row(name, ", ".join(map(str, seeds)), *cells, difference(steps[1], steps[0]))


def options_trials() -> Iterator[str]:
    """Yield the accuracy at the end of the trials that chose these rates."""
    ends: dict[str, dict[str, str]] = {}
    for cells in without_scaled("options"):
        name, _, rate = cells[0].rpartition(", lr ")
        ends.setdefault(name, {})[rate] = cells[4]
    rates = sorted({rate for its in ends.values() for rate in its})
    yield from head("after 100 rounds, seed 1000, %", *(f"lr = {rate}" for rate in rates))
    yield from (row(name, *(its.get(rate, NOTHING) for rate in rates)) for name, its in ends.items())


# The paper's tables


def medium() -> Iterator[str]:
    """Yield of each finished run at the medium scale its accuracy and what may explain it."""
    yield from _medium(CIFAR, "cifar10_resnet18")
    yield ""
    yield from _medium("Shakespeare", "shakespeare_gpt")


def _medium(title: str, experiment: str) -> Iterator[str]:
    quarters = (1, 2, 3)
    yield from head(
        *(title, "rounds", "seed", *(f"{25 * part} %" for part in quarters), "end"),
        *("client's error", "mean's error", "cosine", "held"),
    )
    for path in _cells(experiment, "metrics.jsonl"):
        lines = _lines(path)
        strategy, seed = path.parent.name.rsplit("-", 1)
        rounds, fifth = len(lines), len(lines) // 5
        scores = {line["round"] + 1: line["test_accuracy"] for line in lines if "test_accuracy" in line}
        ends = [rounds * part // 4 for part in quarters]
        means = [f"{100 * fmean(scores[t] for t in scores if end - fifth <= t <= end):.1f}" for end in ends]
        late = [_mean_of(lines[-100:], key) for key in ("discrepancy_client", "discrepancy", "alignment", "coverage")]
        yield row(strategy, rounds, seed, *means, f"{100 * scores[rounds]:.1f}", *late)


def spectra() -> Iterator[str]:
    """Yield how norm and rank of a layer change in a run, the median over the layers."""
    measures = ("norm² / start", "rank at the start", "at the end", "in n largest")
    yield from head(CIFAR, "rounds", "seed", *measures)
    for path in _cells("cifar10_resnet18", "layers.jsonl"):
        records = _lines(path)
        if len(records) < 2 or records[0]["round"] != 0:
            continue  # the start was not recorded
        first, last = ([_squares(layer) for layer in records[i]["layers"].values()] for i in (0, -1))
        strategy, seed = path.parent.name.rsplit("-", 1)
        norm = median(sum(after) / sum(before) for before, after in zip(first, last, strict=True))
        ranks = (f"{median(map(_effective_rank, layers)):.1f}" for layers in (first, last))
        terms = [round(sum(layer[0]["inclusion"])) for layer in records[-1]["layers"].values()]
        held = [100 * sum(squares[:n]) / sum(squares) for squares, n in zip(last, terms, strict=True)]
        yield row(strategy, records[-1]["round"] + 1, seed, f"{norm:.2f}", *ranks, f"{min(held):.0f}–{max(held):.0f} %")


def _cells(experiment: str, file: str) -> list[Path]:
    """Return a file of each run of an experiment, those of 400 rounds first."""
    folders = ("tables_medium", "tables_longer")
    return [path for its in folders for path in sorted((RESULTS / its / "cells" / experiment).glob(f"*/*/{file}"))]


def _squares(layer: list[dict[str, Any]]) -> list[float]:
    return [value**2 for value in layer[0]["magnitudes"]]


def _effective_rank(squares: list[float]) -> float:
    """Return (Σλ²)²/Σλ⁴."""
    return sum(squares) ** 2 / sum(square**2 for square in squares)


def learning_rates() -> Iterator[str]:
    """Yield the accuracy after short runs at several learning rates."""
    rows = [its for folder in ("tables_medium", "beyond") for its in _rows(f"{folder}/learning_rate.csv")]
    last = {(its["strategy"], its["lr"]): float(its["test_accuracy"]) for its in rows}
    rates = sorted({rate for _, rate in last}, key=float)
    yield from head("after 100 rounds, %", *(f"lr = {rate}" for rate in rates))
    for strategy in dict.fromkeys(strategy for strategy, _ in last):
        values = (last.get((strategy, rate)) for rate in rates)
        yield row(strategy, *(NOTHING if value is None else f"{100 * value:.1f}" for value in values))


# Client sampling


def uneven_clients() -> Iterator[str]:
    """Yield the bits that few uploads need where a few clients are large."""
    columns = {"large clients": 0, "uploads": 1, "rounds to 95 %": 6, "Mbit up": 7, "of full": 8, "Mbit both ways": 12}
    rows = (
        [share, *cells] for i, share in enumerate(("10 %", "20 %", "50 %")) for cells in summary("uneven_clients", i)
    )
    yield from chosen(columns | {"last accuracy, %": 9, "α": 11}, *rows, left=2)


def shakespeare_uploads() -> Iterator[str]:
    """Yield the bits that few uploads need on Shakespeare."""
    columns = {"invited": 0, "uploads": 1, "rounds to 30 %": 6, "Mbit up": 7, "of full": 8, "Mbit both ways": 12}
    counts = enumerate(("32", "128"))
    rows = ([count, *cells] for place, count in counts for cells in summary("shakespeare_uploads", place))
    yield from chosen(columns | {"last accuracy, %": 9, "α": 11}, *rows, left=2)


def cifar100_uploads() -> Iterator[str]:
    """Yield the bits that few uploads need where all clients are of equal size."""
    columns = {"uploads": 0, "rounds to 6 %": 5, "Mbit up": 6, "of full": 7, "Mbit both ways": 11}
    yield from chosen(columns | {"last accuracy, %": 8, "α": 10}, *summary("cifar100_uploads"))


def joint_sampling() -> Iterator[str]:
    """Yield the bits that few uploads of shards need."""
    columns = {"uploads": 0, "rounds to 85 %": 5, "Mbit up": 6, "of full": 7, "Mbit both ways": 11}
    yield from chosen(columns | {"last accuracy, %": 8, "α": 10}, *summary("joint_sampling"))


def wireless() -> Iterator[str]:
    """Yield the simulated seconds of each scheme in the three setups, ours and published."""
    setups = {study: {cells[0]: cells for cells in summary(study)} for study in SETUPS}
    yield from head(
        "seconds / proposed", *(f"{name}, {whose}" for name in SETUPS.values() for whose in ("ours", "paper"))
    )
    for scheme in setups["wireless"]:
        yield row(scheme, *(setups[study][scheme][place] for study in setups for place in (3, 5)))


def multi_task() -> Iterator[str]:
    """Yield the accuracy of several models at once, each signal at its best step."""
    columns = ("models", "signal", "accuracy, %", "minus uniform", "MB up a round", "MB down", "trainings a round")
    yield from head(*columns, left=2)
    for count, number in ((5, 0), (4, 1)):
        for signal, *_, best, gain, up, down, trainings in summary("multi_task", number):
            yield row(count, signal, best, gain, up, down, trainings)


# Decay, and speed


def decay() -> Iterator[str]:
    """Yield what the two forms of decay do where nothing clips; a run that diverged is in no table of a comparison."""
    runs: dict[tuple[str, str], list[dict[str, str]]] = {}
    for its in _rows("decay/summary.csv"):
        runs.setdefault((its["settings"].partition("=")[2], its["strategy"]), []).append(its)
    yield from head("decay", "strategy", "runs that ended", "clients lost in them", "accuracy, %", left=2)
    for arm, ended in runs.items():
        accuracies = mean_and_spread([100 * float(its["test_accuracy"]) for its in ended])
        yield row(*arm, f"{len(ended)} of 4", sum(int(its["failed"]) for its in ended), accuracies)


def deployment() -> Iterator[str]:
    """Yield the table of benchmarks/deployment.py's wire."""
    yield from head("nodes", "seconds a round", "Flower's empty round", "MB of shards a round", "extra bytes")
    for nodes, its in sorted(_measured("deployment/wire.json").items(), key=lambda item: int(item[0])):
        yield row(
            *(nodes, f"{min(its['seconds']):.1f}", f"{min(its['seconds_empty']):.1f}"),
            *(f"{its['shard_bytes'] / 1e6:.1f}", f"{100 * median(its['wire_over']):.1f} %"),
        )


def engines() -> Iterator[str]:
    """Yield the table of benchmarks/cohort.py, as far as it was run."""
    yield from head("workload", "sequential, s", "processes, s", "times faster", "sequential, MB", "processes, MB")
    for name, its in _measured_if_there("engines/cohort.json").items():
        if isinstance(its, dict) and "times_sequential" in its:
            base = min(its["seconds_per_round"][one] for one in ("sequential", "sequential_1_thread"))
            memory = its["peak_memory_mb"]
            yield row(
                *(name, f"{base:.2f}", f"{its['seconds_per_round']['processes']:.2f}"),
                *(f"{its['times_sequential']['processes']:.2f}", f"{memory['sequential']:.0f}"),
                f"{memory['processes']:.0f}",
            )


def peers() -> Iterator[str]:
    """Yield the table of benchmarks/peers.py, as far as it was run."""
    yield from head("simulator", "seconds a round", "times ours", "peak MB")
    for name, its in _measured_if_there("engines/peers.json").get("simulators", {}).items():
        times = its.get("ours_is_faster_by", 1.0)
        yield row(name, f"{its['seconds_per_round']:.2f}", f"{times:.2f}", f"{its['peak_memory_mb']:.0f}")


def cluster() -> Iterator[str]:
    """Yield the table of benchmarks/cohort.py on Ray clusters; seconds are only there if the machine was quiet."""
    yield from head("clients a round", "nodes", "seconds a round", "head, MB", "worker, MB")
    for case, by_nodes in _measured_if_there("engines/cluster.json").items():
        for nodes, its in by_nodes.items():
            seconds = f"{its['seconds']:.1f}" if "seconds" in its else NOTHING
            yield row(case, nodes, seconds, f"{its['head_mb']:.0f}", f"{its['worker_mb']:.0f}")


def planner() -> Iterator[str]:
    """Yield the table of benchmarks/planner.py."""
    yield from head("milliseconds", "spectra", "π", "fit", "draw", "whole plan", "reference", "ratio")
    for strategy in ("unbiased", "collective"):
        phases = _measured("planner/planner.json")[strategy]
        shown = [f"{1e3 * phases[phase]:.1f}" for phase in ("spectra", "inclusion", "fit", "draw", "plan")]
        reference = 1e3 * (phases["reference_svd"] + phases["reference_r_draw"])
        yield row(strategy, *shown, f"{reference:.0f}", f"{phases['ratio']:.1f}")


def scale() -> Iterator[str]:
    """Yield the table of benchmarks/scale.py."""
    names = {
        "block": "one block of width 1024",
        "blocks": "six blocks of width 1024",
        "resnet18": "ResNet-18",
        "vit_b": "ViT-B",
        "gpt2_medium": "GPT-2 medium",
        "llama": "Llama-shaped decoder",
    }
    peaks = ("plan_peak", "round_peak", "client_step_peak")
    yield from head("model", "parameters", "MB a client", "plan, s", "average, s", "plan", "round", "client, one step")
    for its in _rows("scale/scale.csv"):
        size, sent = f"{int(its['parameters']) / 1e6:.0f} M", f"{int(its['client_bytes']) / 1e6:.0f}"
        seconds = [its[part] for part in ("plan_seconds", "aggregate_seconds")]
        yield row(names[its["model"]], size, sent, *seconds, *(f"{float(its[peak]):.1f}" for peak in peaks))


def _mean_of(lines: list[dict[str, Any]], key: str) -> str:
    values = [line[key] for line in lines if line.get(key) is not None]
    return f"{fmean(values):.2f}" if values else NOTHING


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _rows(path: str) -> list[dict[str, str]]:
    with (RESULTS / path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _measured_if_there(path: str) -> dict[str, Any]:
    return _measured(path) if (RESULTS / path).exists() else {}


def _measured(path: str) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((RESULTS / path).read_text(encoding="utf-8"))
    return held


def calibration() -> Iterator[str]:
    """Yield the table of benchmarks/calibration.py."""
    yield from head("what is kept of each matrix", "error of the features, %", "accuracy, %")
    for each in _rows("calibration/calibration.csv"):
        if each["keep_ratio"] == "all":
            kept = "all"
        elif each["residual"] == "none":
            kept = f"{100 * float(each['keep_ratio']):.0f} % of the terms, chosen by {each['terms_by']}"
        else:
            kept = f"all, in `{each['residual']}` but for 16 of 384 terms"
        yield row(kept, f"{100 * float(each['feature_error']):.0f}", each["accuracy"])


PARTS: tuple[Table, ...] = (
    *(beyond, beyond_shakespeare, uneven, quickstart),
    *(wire, wires, wire_options),
    *(options, options_gains, options_trials, scaled),
    *(medium, spectra, learning_rates),
    *(uneven_clients, shakespeare_uploads, cifar100_uploads, joint_sampling, wireless, multi_task),
    *(calibration, decay, engines, peers, cluster, deployment, planner, scale),
)
