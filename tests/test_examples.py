"""Every example runs, as it is called, and says what it should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.test_own_parts import EXAMPLES

ROOT = Path(__file__).parents[1]
SAYS = {
    "compress_gpt2.py": ("saved and loaded", "the change is an adapter", "merged: Conv1D again"),
    "inclusion_probabilities.py": (),
    "own_module.py": ("trained in factors", "merged: Linear", "factorized 2 layers"),
    "vit_from_shards.py": ("after 10 rounds: ", "of the model's bytes"),
}


def test_all_examples_are_run():
    """Those of parts of one's own by tests/train/test_own_parts.py, the others here."""
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert scripts == set(SAYS) | {f"{name}.py" for name in EXAMPLES}


@pytest.mark.parametrize("name", SAYS)
def test_it_runs(name, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
    ran = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:sharding", str(ROOT / "examples" / name)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    for words in SAYS[name]:
        assert words in ran.stdout
    if name == "vit_from_shards.py":
        before, after = (float(line.split()[-1].rstrip("%")) for line in ran.stdout.splitlines()[:2])
        assert after > before + 15
