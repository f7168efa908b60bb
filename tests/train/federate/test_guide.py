"""What docs/guides/federation.md tells an operator of the log is what the code logs, both ways."""

import ast
import re
from pathlib import Path

import pytest

from sharding.rounds.failures import Kind

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "guides" / "federation.md").read_text(encoding="utf-8").partition("## What the log says")[2]
OURS, REASONS, _ = re.findall(r"^\|.*?(?=^\n|\Z)", GUIDE, re.M | re.S)
SOURCES = [*sorted((ROOT / "train" / "federate").glob("*.py")), ROOT / "train/rounds.py", ROOT / "train/run.py"]
SOURCES += [
    ROOT / "sharding/flower/exchange.py",
    ROOT / "sharding/flower/nodes.py",
    ROOT / "train/callbacks/stopping.py",
    ROOT / "sharding/rounds/aggregation/aggregate.py",
    ROOT / "sharding/client_sampling/optimal.py",
]


def logged(path):
    """Return the formats that a module logs with."""
    calls = (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
    return [
        ast.literal_eval(call.args[0])
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "log"
    ]


def pattern(form):
    return re.compile(r"%[.\d]*\w".join(map(re.escape, re.split(r"%[.\d]*\w", form))).replace(r"%[.\d]*\w", ".*"))


def first_cells(table):
    return [cell for row in table.splitlines()[2:] for cell in re.findall(r"`([^`]*)`", row.split(" | ")[0])]


OF_A_STRATEGY = {"node %d waits: its partition-id is %d, as that of node %d"}  # here the second node is left out
FORMS = sorted({form for path in SOURCES for form in logged(path)} - OF_A_STRATEGY)


@pytest.mark.parametrize("form", FORMS)
def test_guide_explains_every_log_line(form):
    assert any(pattern(form).fullmatch(line) for line in first_cells(OURS))


@pytest.mark.parametrize("line", first_cells(OURS))
def test_guide_log_lines_are_all_logged(line):
    assert any(pattern(form).fullmatch(line) for form in FORMS)


def test_guide_explains_every_kind_of_failure():
    rows = [row.strip("| ").split(" | ") for row in REASONS.splitlines()[2:]]
    assert {row[1].strip("`") for row in rows} == {*Kind}
