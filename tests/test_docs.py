"""The README and the documentation: snippets and commands run, links lead somewhere, the site builds silently."""

import csv
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from fnmatch import fnmatch
from math import ceil, floor
from pathlib import Path

import pytest
import torch

import sharding
from docs import generate, reference
from docs.pictures import result
from models import MODELS
from sharding import DESIGNS, SAMPLERS, STRATEGIES
from tests.train.runs import TINY
from train.cli.arguments import parse
from train.cli.commands import main
from train.cli.inspection import inspect_partition
from train.config.schema import load_config
from train.data import DATASETS
from train.data.partition import PARTITIONS
from train.experiment.metrics import RoundMetrics
from train.report.tables.layout import TABLES

pytestmark = pytest.mark.usefixtures("fork_server")

ROOT = Path(__file__).parents[1]
PAGES = generate.pages()
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
SNIPPETS = [(page, code) for page, text in TEXTS.items() for code in re.findall(r"```python\n(.*?)```", text, re.S)]
FORMS = (
    r"`(python -m train [^`…]+)`",  # in a sentence
    r"^(?:\$ |\t\$\(BIN\)/)(python -m train (?:[^#\n\\]|\\\n)+)",  # in a block, and in the Makefile
)
COMMANDS = sorted(
    {
        " ".join(command.replace("\\\n", " ").split())
        for text in (*TEXTS.values(), (ROOT / "Makefile").read_text(encoding="utf-8"))
        for form in FORMS
        for command in re.findall(form, text, re.M)
        if not re.search(r"\b[A-Z]{3,}|\bN\b", command)  # a placeholder, as in `table N`
    }
)


@pytest.mark.parametrize(("page", "snippet"), SNIPPETS, ids=[page for page, _ in SNIPPETS])
def test_docs_snippets_run(page, snippet, tmp_path, monkeypatch):
    if "runs/quickstart-top_n-0" in snippet:
        assert main(["run", "configs/quickstart.yaml", *TINY, f"output={tmp_path}/runs/quickstart-top_n-0"]) == 0
        monkeypatch.chdir(tmp_path)
    if "flwr" in snippet:
        pytest.importorskip("flwr", reason="needs the extra `flower`")
        monkeypatch.syspath_prepend(ROOT / "examples" / "flower_app")
    torch.manual_seed(0)
    exec(compile(snippet, page, "exec"), names := {})
    if "def accuracy" in snippet:
        assert names["accuracy"]() > 0.7  # chance is 0.1


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("registries_as_before")
def test_docs_commands_parse(command):
    """Options, files, keys and values exist."""
    args = parse(shlex.split(command)[3:])
    if hasattr(args, "config"):
        load_config(args.config, args.overrides)
    if hasattr(args, "number"):
        assert args.number in TABLES


def test_docs_show_what_inspect_prints(tmp_path):
    shown = re.search(r"inspect configs/quickstart.yaml\n(.*?)```", TEXTS["docs/guides/data.md"], re.S)[1].splitlines()
    told = inspect_partition(load_config("configs/quickstart.yaml"), tmp_path)
    assert [*told][: len(shown)] == shown


def shortened(words, data, into):
    """Return a command that trains for two small rounds, on drawn data, in one process, with the first seed."""
    on_digits = words[1] in ("configs/quickstart.yaml", "configs/privacy.yaml")
    at = [] if on_digits else [f"data.root={data}", "data.download=false"]
    overrides = [*TINY, *at, "engine=sequential", f"output={into}"]
    keys = {word.partition("=")[0] for word in overrides}
    kept = [word for word in words if not {word.partition("=")[0], word.partition("=")[0].partition(".")[0]} & keys]
    kept = [re.sub(r"^(\d),\d[\d,]*$", r"\1", word) for word in kept]
    return [*kept, *overrides]


TRAINING = [
    command
    for command in COMMANDS
    if command.split()[3] in ("run", "compare")
    and "engine=ray" not in command  # its own tests have a cluster
    and "tracker=wandb" not in command  # and its own start W&B
    and "configs/finetune.yaml" not in command  # and its own a pretrained model
]


@pytest.mark.parametrize("command", TRAINING)
@pytest.mark.usefixtures("registries_as_before", "started", "undrawn")
def test_docs_commands_train(command, tmp_path, drawn_data):
    words = shortened(shlex.split(command)[3:], drawn_data, tmp_path / "run")
    assert main(words) == 0
    assert (tmp_path / "run" / "summary.md").is_file()


@pytest.mark.parametrize("page", TEXTS)
def test_docs_links_resolve_to_files(page):
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#\s]+)", TEXTS[page]):
        assert "://" in target or (folder / target).exists(), f"{page} links to {target}"


def test_docs_architecture_names_existing_files():
    paths = re.findall(r"`([\w/]+/[\w./]*)`", TEXTS["docs/reference/architecture.md"])
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_docs_generated_parts_are_current_and_all_on_a_page():
    parts = generate.parts()
    stale = [page for page, text in TEXTS.items() if generate.filled(text, parts) != text]
    assert stale == [], "run python docs/generate.py"
    assert {name for text in TEXTS.values() for name in re.findall(r"<!-- begin: (\w+) -->", text)} == parts.keys()


def test_docs_pages_include_nothing():
    """Where code is hosted, nothing is included."""
    assert [page for page, text in TEXTS.items() if "{include}" in text] == []


@pytest.mark.parametrize("registry", [STRATEGIES, DESIGNS, MODELS, DATASETS, PARTITIONS, SAMPLERS])
def test_docs_list_every_registered_name(registry):
    everything = "".join(TEXTS.values())
    assert [name for name in registry if f"`{name}`" not in everything] == []


def cells(summary, method):
    """Return the last row of a method in a committed summary, without its name."""
    text = (ROOT / "results" / summary / "summary.md").read_text(encoding="utf-8")
    return re.findall(rf"^\| {re.escape(method)} \| (.+) \|$", text, re.M)[-1].split(" | ")


def test_docs_list_every_metric():
    page = TEXTS["docs/reference/metrics.md"]
    unnamed = {metric.name for metric in fields(RoundMetrics) if f"`{metric.name}`" not in page} - {"is_lost"}
    assert unnamed == {"seconds_train", "seconds_aggregate", "seconds_evaluate", "extra"}  # abbreviated; of others


def test_readme_has_the_last_line_of_the_quickstart():
    readme = " ".join(TEXTS["README.md"].split())
    ends = {True: [], False: []}  # accuracy in % of dense runs, of sharded ones
    table = (ROOT / "results/quickstart_seeds/summary.csv").read_text(encoding="utf-8")
    for run in csv.DictReader(table.splitlines()):
        ends[run["strategy"] == "dense"].append(100 * float(run["test_accuracy"]))
    sharded, dense = (f"{floor(min(values))} to {ceil(max(values))} %" for values in (ends[False], ends[True]))
    assert f"{sharded} with sharding and {dense} with dense" in readme


def test_readme_and_results_headlines_equal_committed_results():
    readme, results = (" ".join(TEXTS[page].split()) for page in ("README.md", "docs/results/index.md"))
    sharded, dense = (cells("quickstart_seeds", name) for name in ("top_n", "dense"))
    assert round(float(dense[0].split()[0]) - float(sharded[0].split()[0])) == 1
    assert "one point below training the whole model" in readme
    assert f"{sharded[0]},<br>{dense[0]}" in results
    assert f"for {sharded[-2].split()[0]} % of the bytes" in readme
    published = result.curve_of("shortcuts/timm_whole", "collective")[2]
    assert f"[{published} %](docs/results/paper.md" in readme
    assert f"[{cells('options', 'low_rank, nesterov, lr 0.02')[-3]} %](docs/results/beyond.md" in readme


def test_readme_picture_has_the_ends_of_the_committed_curves():
    picture = (ROOT / "docs/pictures/result.svg").read_text(encoding="utf-8")
    ends = {f"{result.curve_of(*run)[2]} %" for run in result.RUNS}
    assert {end for end in ends if end not in picture} == set()


def test_docs_reference_lists_the_public_names_in_order():
    assert re.findall(r"^\| `(\w+)", "\n".join(reference.api()), re.M) == sharding.__all__


@pytest.mark.slow  # and `pages.yml` builds the site of each push
def test_docs_site_builds_without_warnings(tmp_path):
    """In a process of its own: Sphinx changes what is imported."""
    pytest.importorskip("sphinx", reason="the documentation needs pip install -e '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    for page in PAGES[1:]:
        assert (tmp_path / page.relative_to(ROOT / "docs")).with_suffix(".html").exists()
    keys = (tmp_path / "reference" / "configuration.html").read_text(encoding="utf-8")
    assert "local.decay" in keys
    assert ">None<" not in keys  # a key without a description


def test_docs_results_page_lists_every_committed_result():
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout, so committed files are unknown")
    listed = subprocess.run(["git", "ls-files", "results"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name.removeprefix("results/") for name in listed.stdout.splitlines()]
    rows = re.findall(r"^\| (`.*?`) \|", TEXTS["docs/results/index.md"], re.M)
    patterns = [pattern for row in rows for pattern in re.findall(r"`(.+?)`", row)]
    assert [name for name in files if not any(fnmatch(name, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in files)] == []
