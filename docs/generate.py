"""Parts of pages that nobody should write by hand: tables from committed measurements, keys from the models."""

import csv
import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # `train` runs from a checkout

from train.config.schema import Config  # noqa: E402
from train.config.sections import Section  # noqa: E402

TRIALS = {  # files of results/beyond/screening
    "annealed": "annealed from `top_n` to `collective`, the whole run of 100 rounds",
    "uneven_collective": "`collective` with the four options, r = 0.2 and 0.4, rate 0.025, 100 rounds",
    "uneven_top_n": "`top_n`, the same",
    "no_decay": "`collective` without decay (`local.frobenius_decay=0`)",
    "low_rank_top_n": "`top_n` from a start of rank n",
    "low_rank_products": "`collective` from a start of rank n, means of products",
    "low_rank_products_nesterov": "the same, `nesterov`",
}


def parts() -> dict[str, str]:
    """Return every generated part by its name, as Markdown that pages include."""
    sources = (
        *(configuration, engines, peers, over_flower, deployment, planner),
        *(medium, learning_rates, beyond, screened, hundred_rounds, wires),
    )
    return {source.__name__: "\n".join(source()) + "\n" for source in sources}


def write(folder: Path) -> None:
    """Write every generated part to a file of its own."""
    folder.mkdir(exist_ok=True)
    for name, text in parts().items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")


def table(*columns: str) -> Iterator[str]:
    """Yield the head of a table: the first column is text, the others are numbers."""
    yield f"| {' | '.join(columns)} |"
    yield "|---|" + "---:|" * (len(columns) - 1)


def configuration() -> Iterator[str]:
    """Yield one table a section of the configuration."""
    yield from _section(Config, "")


def engines() -> Iterator[str]:
    """Yield the table of benchmarks/cohort.py."""
    yield from table(
        *("seconds a round", "sequential", "processes", "times sequential", "peak MB, sequential / processes"),
    )
    for name, case in _measured("results/engines/cohort.json").items():
        if isinstance(case, dict) and "seconds_per_round" in case:
            seconds, memory = case["seconds_per_round"], case["peak_memory_mb"]
            sequential = min(seconds["sequential"], seconds["sequential_1_thread"])
            yield (
                f"| {name} | {sequential:.2f} | {seconds['processes']:.2f} | {sequential / seconds['processes']:.2f} "
                f"| {memory['sequential']:,.0f} / {memory['processes']:,.0f} |"
            )


def peers() -> Iterator[str]:
    """Yield the table of benchmarks/peers.py."""
    yield from table("simulator", "seconds a round", "ours is faster by", "peak MB")
    for name, its in _measured("results/engines/peers.json")["simulators"].items():
        ratio = f"{its['ours_is_faster_by']:.2f}" if "ours_is_faster_by" in its else ""
        yield f"| {name} | {its['seconds_per_round']:.2f} | {ratio} | {its['peak_memory_mb']:,.0f} |"


def over_flower() -> Iterator[str]:
    """Yield the table of benchmarks/deployment.py's engines."""
    yield from table(
        *("10 clients, r = 0.1", "our engine", "one by one, one process", "Flower's simulation"),
        *("ours is faster by", "of that by training"),
    )
    for name, its in _measured("results/deployment/engines.json").items():
        ours, sequential, flower = its["ours"], its["sequential"], its["flower"]
        training = sequential / its["cores"] / ours  # as if all cores did nothing but train one by one
        yield f"| {name} | {ours:.2f} | {sequential:.2f} | {flower:.2f} | {flower / ours:.1f} | {training:.1f} |"


def deployment() -> Iterator[str]:
    """Yield the table of benchmarks/deployment.py's wire."""
    yield from table(
        *("nodes", "seconds a round", "Flower's empty round", "shards a round, both ways, MB"),
        "bytes on the wire beyond them",
    )
    for nodes, its in sorted(_measured("results/deployment/wire.json").items(), key=lambda row: int(row[0])):
        over = sorted(its["wire_over"])[len(its["wire_over"]) // 2]
        yield (
            f"| {nodes} | {min(its['seconds']):.1f} | {min(its['seconds_empty']):.1f} "
            f"| {its['shard_bytes'] / 1e6:.1f} | {100 * over:.1f} % |"
        )


def planner() -> Iterator[str]:
    """Yield the table of benchmarks/planner.py."""
    yield from table("milliseconds", "spectra", "π", "fit", "draw", "whole plan", "reference", "ratio")
    measured = _measured("results/planner/planner.json")
    for strategy in ("unbiased", "collective"):
        phases = measured[strategy]
        shown = [f"{1e3 * phases[phase]:.1f}" for phase in ("spectra", "inclusion", "fit", "draw", "plan")]
        reference = 1e3 * (phases["reference_svd"] + phases["reference_r_draw"])
        yield f"| {strategy} | {' | '.join(shown)} | {reference:.0f} | {phases['ratio']:.1f} |"


def medium() -> Iterator[str]:
    """Yield a table an experiment at the medium scale: of each finished run its accuracy and what may explain it."""
    yield from _medium("CIFAR-10", "cifar10_resnet18")
    yield ""
    yield from _medium("Shakespeare", "shakespeare_gpt")


def _medium(title: str, experiment: str) -> Iterator[str]:
    quarters = (1, 2, 3, 4)
    yield from table(
        *(f"{title}, r = 0.1", "rounds", "seed", *(f"{25 * part} %" for part in quarters), "last"),
        *("client's model off by", "clients' mean off by", "cosine with FedAvg", "terms with a holder", "lost"),
        "in the n largest",
    )
    cells = ROOT / "results" / "tables_medium" / "cells" / experiment
    runs = [
        (path.parent, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()])
        for path in sorted(cells.glob("*/*/metrics.jsonl"))
    ]
    for folder, lines in sorted(runs, key=lambda run: len(run[1])):
        strategy, seed = folder.name.rsplit("-", 1)
        rounds, fifth = len(lines), len(lines) // 5
        scores = {line["round"] + 1: line["test_accuracy"] for line in lines if "test_accuracy" in line}
        ends = [rounds * part // 4 for part in quarters]
        means = [f"{100 * fmean(scores[t] for t in scores if end - fifth <= t <= end):.1f}" for end in ends]
        late = lines[-100:]
        told = [_mean_of(late, key, 2) for key in ("discrepancy_client", "discrepancy", "alignment", "coverage")]
        lost = sum(line["failed"] for line in lines)
        last = f"{100 * scores[rounds]:.1f}"
        row = [strategy, str(rounds), seed, *means, last, *told, str(lost), _held(folder)]
        yield f"| {' | '.join(row)} |"


def _held(folder: Path) -> str:
    """Return the least and the most, over layers, that the n largest terms hold of the squared norm after a run.

    A dash where no layer is sharded.
    """
    path = folder / "layers.jsonl"
    if not path.exists():
        return "–"
    last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    shares = []
    for (group,) in last["layers"].values():
        squares = [value**2 for value in group["magnitudes"]]
        shares.append(100 * sum(squares[: round(sum(group["inclusion"]))]) / sum(squares))
    return f"{min(shares):.0f}–{max(shares):.0f} %"


def learning_rates() -> Iterator[str]:
    """Yield the accuracy after short runs at other learning rates: of strategies, and of what they are held to."""
    last = {}
    for folder in ("tables_medium", "beyond"):
        rows = _rows(f"results/{folder}/learning_rate.csv")
        last |= {(row["strategy"], row["lr"]): float(row["test_accuracy"]) for row in rows}
    rates = sorted({rate for _, rate in last}, key=float)
    yield from table("after 100 rounds, %", *(f"lr = {rate}" for rate in rates))
    for strategy in dict.fromkeys(strategy for strategy, _ in last):
        shown = (last.get((strategy, rate)) for rate in rates)
        yield f"| {strategy} | {' | '.join('–' if value is None else f'{100 * value:.1f}' for value in shown)} |"


def beyond() -> Iterator[str]:
    """Yield the README's columns of the table of studies/beyond.py, of methods with two seeds at least."""
    shown = ("method", "rounds", "GB", "seeds", "end", "end, less collective's")
    lines = (ROOT / "results" / "beyond" / "summary.md").read_text(encoding="utf-8").splitlines()
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|"))
    yield from table("CIFAR-10, r = 0.1", *shown[1:4], "accuracy, %", "less `collective`'s, of the same seeds")
    for row in (dict(zip(head, row, strict=True)) for row in rows):
        if "," in row["seeds"]:
            yield f"| {' | '.join(row[name] for name in shown)} |"


def screened() -> Iterator[str]:
    """Yield the accuracy of short trials on the way, beside the published strategies' own."""
    rounds = (40, 60, 80, 100, 120)
    yield from table("trial", *(f"round {t}" for t in rounds), "client's model off by")
    cells = ROOT / "results" / "tables_medium" / "cells" / "cifar10_resnet18" / "r0.1"
    files = {f"{name}, as published": cells / f"{name}-0" / "metrics.jsonl" for name in ("collective", "top_n")}
    files |= {TRIALS[path.stem]: path for path in sorted((ROOT / "results" / "beyond" / "screening").glob("*"))}
    for name, path in files.items():
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        scores = {line["round"] + 1: f"{100 * line['test_accuracy']:.1f}" for line in lines if "test_accuracy" in line}
        off = _mean_of([line for line in lines if 60 <= line["round"] < 80], "discrepancy_client", 2)
        yield f"| {name} | {' | '.join(scores.get(t, '–') for t in rounds)} | {off} |"


def hundred_rounds() -> Iterator[str]:
    """Yield where whole runs of 100 rounds ended, the best first."""
    last = {row["trial"]: row for row in _rows("results/beyond/hundred_rounds.csv")}
    yield from table("100 rounds, one run each", "MB", "accuracy, %")
    for trial, row in sorted(last.items(), key=lambda item: -float(item[1]["test_accuracy"])):
        yield f"| {trial} | {row['megabytes']} | {100 * float(row['test_accuracy']):.1f} |"


def wires() -> Iterator[str]:
    """Yield what each wire loses, over pairs of equal strategy and seed, and its share of the bytes."""
    rows = _rows("results/wire/summary.csv")
    runs = {(row["settings"].removeprefix("compression="), row["strategy"], row["seed"]): row for row in rows}
    yield from table("against float32", "pairs", "points, mean ± standard error", "of its bytes")
    for wire in ("bfloat16", "int8"):
        pairs = [(row, runs["float32", *which]) for (its, *which), row in runs.items() if its == wire]
        gaps = [100 * (float(ours["test_accuracy"]) - float(theirs["test_accuracy"])) for ours, theirs in pairs]
        shares = [100 * float(ours["megabytes"]) / float(theirs["megabytes"]) for ours, theirs in pairs]
        error = stdev(gaps) / len(gaps) ** 0.5
        share = f"{min(shares):.0f}–{max(shares):.0f} %"
        yield f"| {wire} | {len(gaps)} | {fmean(gaps):+.1f} ± {error:.1f} | {share} |"


def _mean_of(lines: list[dict[str, Any]], key: str, digits: int) -> str:
    values = [line[key] for line in lines if line.get(key) is not None]
    return f"{fmean(values):.{digits}f}" if values else "–"


def _section(section: type[Section], prefix: str) -> Iterator[str]:
    inner = {
        name: info.annotation
        for name, info in section.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
    }
    yield from ("| key | default | meaning |", "|---|---|---|")
    defaults: dict[str, Any] = {}  # some follow from those before them
    for name, info in section.model_fields.items():
        if name not in inner:
            if not info.is_required():
                defaults[name] = info.get_default(call_default_factory=True, validated_data=defaults)
            default = f"`{json.dumps(defaults[name])}`" if name in defaults else "–"
            yield f"| `{prefix}{name}` | {default} | {' '.join(str(info.description).split())} |"
    for name, its in inner.items():
        yield from ("", f"## `{name}`", "", " ".join((its.__doc__ or "").split()), "")
        yield from _section(its, f"{prefix}{name}.")


def _rows(path: str) -> list[dict[str, str]]:
    with (ROOT / path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _measured(path: str) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((ROOT / path).read_text(encoding="utf-8"))
    return held


if __name__ == "__main__":
    ArgumentParser(description=__doc__).parse_args()
    write(ROOT / "docs" / "_generated")
