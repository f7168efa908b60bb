"""The README's snippets run, and its tables name everything there is."""

import json
import re
from pathlib import Path

import pytest
import torch

from models import MODELS
from sharding import COORDINATIONS, DESIGNS, STRATEGIES
from sharding.clients import SAMPLERS
from train.config import Config, _known_keys
from train.data import DATASETS
from train.partition import PARTITIONS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_the_snippets_run(snippet, capsys):
    torch.manual_seed(0)
    exec(compile(snippet, "README.md", "exec"), names := {})
    if "aggregate" in snippet:
        assert "averaged: ['phone', 'tablet', 'laptop'] left out: {}" in capsys.readouterr().out
        inputs = names["inputs"]["laptop"]
        hits = names["model"](inputs).argmax(1) == inputs[:, :10].argmax(1)
        assert hits.float().mean() > 0.8  # it has learned: chance is 0.1


def test_there_are_snippets():
    assert len(SNIPPETS) == 2


@pytest.mark.parametrize("registry", [STRATEGIES, DESIGNS, COORDINATIONS, MODELS, DATASETS, PARTITIONS, SAMPLERS])
def test_every_name_is_in_the_readme(registry):
    assert [name for name in registry if f"`{name}`" not in README] == []


def test_every_config_key_is_in_the_readme():
    named = set(re.findall(r"`([\w.]+)`", README))
    missing = {key for key in _known_keys(Config) if not named & {key, "." + key.rpartition(".")[2]}}
    assert missing <= {
        "model",
        "data",
        "clients",
        "network",
        "local",
        "aggregation",
        "tracking",
    }  # the sections themselves


@pytest.mark.parametrize("summary", sorted((ROOT / "results").glob("*/summary.md")), ids=lambda path: path.parent.name)
def test_numbers_in_the_readme_are_those_of_the_committed_results(summary):
    lines = summary.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ") and "strategy" not in line]
    assert rows
    assert [row for row in rows if row not in README] == []


def engine_rows():
    """One row a case of benchmarks/cohort.py."""
    cases = json.loads((ROOT / "benchmarks" / "results" / "cohort.json").read_text(encoding="utf-8"))
    for name, case in cases.items():
        if isinstance(case, dict) and "seconds_per_round" in case:
            seconds, memory = case["seconds_per_round"], case["peak_memory_mb"]
            sequential = min(seconds["sequential"], seconds["sequential_1_thread"])
            fastest = max(case["times_sequential"].values())
            yield (
                f"| {name} | {sequential:.2f} | {seconds['stacked']:.2f} | {seconds['processes']:.2f} | {fastest:.2f} "
                f"| {memory['sequential']:,.0f} / {memory['processes']:,.0f} |"
            )


def peer_rows():
    """One row a simulator of benchmarks/peers.py."""
    peers = json.loads((ROOT / "benchmarks" / "results" / "peers.json").read_text(encoding="utf-8"))["simulators"]
    for name, its in peers.items():
        ratio = f"{its['ours_is_faster_by']:.2f}" if "ours_is_faster_by" in its else ""
        yield f"| {name} | {its['seconds_per_round']:.2f} | {ratio} | {its['peak_memory_mb']:,.0f} |"


def table_rows():
    """The rows of tables of which something has been run."""
    for table in sorted((ROOT / "results").glob("*/table*.md")):
        for line in table.read_text(encoding="utf-8").splitlines():
            if re.match(r"\| \w+ \|.* ± ", line) and any(re.match(r"\d", cell) for cell in line.split(" | ")[1::2]):
                yield line


@pytest.mark.parametrize("rows", [engine_rows, peer_rows, table_rows], ids=lambda rows: rows.__name__)
def test_the_benchmarks_and_tables_in_the_readme_are_those_of_the_committed_results(rows):
    written = list(rows())
    assert written
    assert [row for row in written if row not in README] == []


def test_the_planners_timings_in_the_readme_are_those_of_the_committed_results():
    timings = json.loads((ROOT / "results" / "planner" / "planner.json").read_text(encoding="utf-8"))
    for strategy in ("unbiased", "collective"):
        phases = timings[strategy]
        shown = [f"{1e3 * phases[phase]:.1f}" for phase in ("spectra", "inclusion", "fit", "draw", "plan")]
        reference = 1e3 * (phases["reference_svd"] + phases["reference_r_draw"])
        assert f"| {strategy} | {' | '.join(shown)} | {reference:.0f} | {phases['ratio']:.1f} |" in README
