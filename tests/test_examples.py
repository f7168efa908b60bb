"""Every example runs, in this process, and says what it should."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.encoder import write_encoder
from tests.train.test_own_parts import EXAMPLES

pytestmark = pytest.mark.usefixtures("fork_server")

ROOT = Path(__file__).parents[1]
SAYS = {
    "compress_gpt2.py": ("saved and loaded", "the change is an adapter", "merged: Conv1D again"),
    "finetune_minilm.py": ("on top of a frozen residual", "first contact: ", "MB to the phone", "of 4 other texts"),
    "inclusion_probabilities.py": ("wrote inclusion_probabilities.png",),
    "one_round.py": ("after 20 rounds: 7",),
    "own_module.py": ("trained in factors", "merged: Linear", "factorized 2 layers"),
    "vit_from_shards.py": ("round 10: ", "of the model's bytes"),
}
LONG = {"one_round.py", "vit_from_shards.py"}


def test_examples_are_all_tested():
    """Those of parts of one's own by tests/train/test_own_parts.py, the others here."""
    scripts = {path.name for path in (ROOT / "examples").glob("[!_]*.py")}
    assert scripts == set(SAYS) | {f"{name}.py" for name in EXAMPLES}


def arguments(name, folder):
    """Return a small model in the place of one that would be downloaded."""
    if name != "finetune_minilm.py":
        return []
    return [write_encoder(folder / "weights", re.findall("[a-z]+", (ROOT / "examples" / name).read_text()))]


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in LONG else n for n in SAYS])
def test_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *arguments(name, tmp_path)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("train.rounds.run_rounds", lambda *args: None)  # a figure is drawn of an untrained model, too
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    said = capsys.readouterr().out
    assert all(words in said for words in SAYS[name])
    if name == "vit_from_shards.py":
        before, after = (float(line.split()[-1].rstrip("%")) for line in (said.splitlines()[0], said.splitlines()[10]))
        assert after > before + 15
