"""Every script prints its help, and does nothing else."""

import argparse
import contextlib
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.train.runs import QUICKSTART, TINY

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    path
    for folder in ("examples", "benchmarks", "docs")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    and path.stem not in ("on_pfl", "on_blazefl")  # their simulators have environments of their own
]
NEEDS = {
    "federation_memory": "flwr",
    "on_flower": "flwr",
    "compress_gpt2": "transformers",
    "finetune_minilm": "transformers",
    "vit_from_shards": "timm",
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_help_writes_nothing(script, tmp_path, monkeypatch, capsys):
    if script.stem in NEEDS:
        pytest.importorskip(NEEDS[script.stem])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
    monkeypatch.setattr(torch.Tensor, "backward", lambda *_, **__: pytest.fail("it trains"))
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    first = re.search(r'^"""(.+?)(?:\.|\n|""")', script.read_text(encoding="utf-8"))
    assert first
    assert " ".join(first[1].split())[:40] in " ".join(said.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_engines_benchmark_runs_a_round(engine, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    cohort = importlib.import_module("cohort")
    where = argparse.Namespace(device="cpu", data=None)
    experiment = cohort.make([QUICKSTART, *TINY], engine, where)
    assert cohort.time_round(experiment, 0, torch.get_num_threads()) > 0
    experiment.close()


@pytest.mark.parametrize("minutes", ["5", "0"])
def test_gpu_benchmark_in_tiny_form_runs_each_kind_of_part_or_says_why_not(minutes, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu = importlib.import_module("gpu")
    monkeypatch.setattr(gpu, "SETTINGS", {"cifar10_resnet18": gpu.SETTINGS["cifar10_resnet18"]})
    monkeypatch.setattr(gpu, "DIFFERENCES", {name: gpu.DIFFERENCES[name] for name in ("batch norm", "tail")})
    file = tmp_path / "cpu.json"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--minutes", minutes, "--output", str(file)])
    gpu.main()
    results = json.loads(file.read_text())
    parts = results["parts"]
    assert list(parts)[:2] == ["difference/batch norm", "difference/tail"]
    if minutes == "0":
        assert all("over" in part["skipped"] for part in parts.values())
        return
    assert not [name for name, part in parts.items() if "failed" in part]
    assert parts["difference/tail"]["lanes"] == parts["difference/batch norm"]["lanes"] == 0
    assert "tiny form" in results["random_samples"]["cifar10"]
    assert parts["rounds/cifar10_resnet18/bfloat16"]["seconds"] > 0


def test_gpu_benchmark_runs_the_parts_that_are_asked_for_and_names_all_where_none_is(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gpu, file = importlib.import_module("gpu"), tmp_path / "cpu.json"
    command = ["gpu.py", "--device", "cpu", "--output", str(file), "--only"]
    monkeypatch.setattr(sys, "argv", [*command, "rounds/*nse/float32"])
    gpu.main()
    parts = json.loads(file.read_text())["parts"]
    assert list(parts) == ["rounds/dense/float32", "rounds/dense/float32, kernels by time"]
    assert all(part["failed_clients"] == 0 for part in parts.values())
    before = torch.backends.cudnn.benchmark
    assert gpu.kernels_by_time(lambda: {"chosen": torch.backends.cudnn.benchmark}) == {"chosen": True}
    assert torch.backends.cudnn.benchmark == before
    monkeypatch.setattr(sys, "argv", [*command, "rowns"])
    with pytest.raises(SystemExit, match="2"):
        gpu.main()
    assert "--only 'rowns' matches no part; parts: difference/resnet" in capsys.readouterr().err


@pytest.mark.slow
def test_benchmark_of_simulators_runs_a_round_on_ours(tmp_path):
    for name, size in (("images", 1000 * 50 * 3 * 32 * 32), ("classes", 1000 * 50 * 8)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)  # zeros that take no space
    environment = os.environ | {"PEERS_ROUNDS": "0", "PEERS_DATA": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "peers" / "on_ours.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "RESULT" in done.stdout, done.stderr
