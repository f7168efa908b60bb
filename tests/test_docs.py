"""The README and the documentation: snippets and commands run, links lead somewhere, the site builds silently."""

import importlib.util
import re
import shlex
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch

from models import MODELS
from sharding import COORDINATIONS, DESIGNS, STRATEGIES
from sharding.clients import SAMPLERS
from tests.train.conftest import ROOT as DATA
from tests.train.test_runs import TINY
from train.__main__ import main
from train.arguments import parse
from train.config import load_config
from train.data import DATASETS
from train.partition import PARTITIONS
from train.tables import load_layout

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md"))]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
SNIPPETS = [(page, code) for page, text in TEXTS.items() for code in re.findall(r"```python\n(.*?)```", text, re.S)]
WRITTEN = r"`(python -m train [^`…]+)`", r"^\$ (python -m train (?:[^#\n\\]|\\\n)+)"  # in a sentence, and in a block
COMMANDS = sorted(
    {
        " ".join(command.replace("\\\n", " ").split())
        for text in TEXTS.values()
        for form in WRITTEN
        for command in re.findall(form, text, re.M)
        if not re.search(r"\b[A-Z]{3,}|\bN\b", command)  # a placeholder, as in `table N`
    }
)


@pytest.mark.parametrize(("page", "snippet"), SNIPPETS, ids=[page for page, _ in SNIPPETS])
def test_snippets_run(page, snippet, capsys):
    torch.manual_seed(0)
    exec(compile(snippet, page, "exec"), names := {})
    if "aggregate(" in snippet:
        assert "averaged: ['phone', 'tablet', 'laptop'] left out: {}" in capsys.readouterr().out
        inputs = names["inputs"]["laptop"]
        hits = names["model"](inputs).argmax(1) == inputs[:, :10].argmax(1)
        assert hits.float().mean() > 0.8  # it has learned: chance is 0.1


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command):
    """Options, files, keys and values exist."""
    args = parse(shlex.split(command)[3:])
    if hasattr(args, "config"):
        load_config(args.config, args.overrides)
    if hasattr(args, "number"):
        load_layout().find(args.number)


def shortened(words, data, into):
    """Return a command that trains for two small rounds, with its data where the tests have them."""
    own = [*TINY, f"data.root={data}", "data.download=false", f"output={into}"]
    replaced = {word.partition("=")[0] for word in own}
    return [*(word for word in words if word.partition("=")[0] not in replaced), *own]


TRAINING = [command for command in COMMANDS if command.split()[3] in ("run", "compare")]


@pytest.mark.parametrize("command", TRAINING)
def test_commands_train(command, tmp_path, capsys):
    words = shlex.split(command)[3:]
    if load_config(words[1]).data.name != "digits" and not (DATA / "cifar10").is_dir():
        pytest.skip(f"no cifar10 under {DATA}")
    assert main(shortened(words, DATA, tmp_path / "run")) == 0
    assert str(tmp_path / "run" / "summary.md") in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 0
    assert "<figure" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_there_are_snippets_and_commands():
    assert len(SNIPPETS) >= 3
    assert len(COMMANDS) >= 4


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_to_files(page):
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#\s]+)", TEXTS[page]) + re.findall(r"```\{include\} (\S+)", TEXTS[page]):
        if "://" not in target:
            assert (folder / target).exists(), f"{page} links to {target}"


@pytest.mark.parametrize("registry", [STRATEGIES, DESIGNS, COORDINATIONS, MODELS, DATASETS, PARTITIONS, SAMPLERS])
def test_every_name_is_documented(registry):
    everything = "".join(TEXTS.values())
    assert [name for name in registry if f"`{name}`" not in everything] == []


def test_the_readme_is_three_screens():
    lines = TEXTS["README.md"].splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 260


@pytest.mark.parametrize("table", ["results/quickstart_seeds/summary.md", "docs/_generated/beyond.md"])
def test_the_readmes_tables_are_the_committed_ones(table):
    rows = [line for line in (ROOT / table).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    assert rows
    assert [row for row in rows if row not in TEXTS["README.md"]] == []


def test_the_site_builds_without_a_warning(tmp_path):
    """In a process of its own: Sphinx changes what is imported."""
    pytest.importorskip("sphinx", reason="the documentation needs pip install -e '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    for page in (ROOT / "docs").glob("*/*.md"):
        if page.parent.name != "_generated":
            assert (tmp_path / page.relative_to(ROOT / "docs")).with_suffix(".html").exists()
    keys = (tmp_path / "reference" / "configuration.html").read_text(encoding="utf-8")
    assert "local.frobenius_decay" in keys
    assert ">None<" not in keys  # a key without a description


def test_the_generated_parts_are_those_of_what_they_are_made_from(tmp_path):
    specification = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generate)
    generate.write(tmp_path)
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    committed = (ROOT / "docs" / "_generated").iterdir()
    assert made == {path.name: path.read_text(encoding="utf-8") for path in committed}  # else `make docs`, and commit


def test_every_committed_result_is_on_the_page_that_says_what_it_supports():
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout, so that nobody knows what is committed")
    listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name.removeprefix("results/") for name in listed.stdout.splitlines()]
    rows = re.findall(r"^\| (`.*?`) \|", TEXTS["docs/results/index.md"], re.M)
    patterns = [pattern for row in rows for pattern in re.findall(r"`(.+?)`", row)]
    assert [name for name in files if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in files)] == []


def test_no_two_pages_have_the_same_title():
    titles = [re.search(r"^# (.+)$", text, re.M)[1] for page, text in TEXTS.items() if "_generated" not in page]
    assert sorted(set(titles)) == sorted(titles)
