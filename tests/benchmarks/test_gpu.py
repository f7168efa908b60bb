"""The GPU's one command, from end to end on a CPU at a tiny scale."""

import re
import sys

from benchmarks import gpu
from tests.train.test_runs import TINY


def test_the_column_is_run_in_its_order_and_not_run_again(tmp_path):
    words = ["column", str(tmp_path), "--data", "nowhere", "--jobs", "1", *TINY]
    words += ["data.name=digits", "local.batch_size=8", "device=cpu"]
    assert gpu.main(words) == 0
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/*/*/metrics.jsonl")}
    order = [path.parent.name.removesuffix("-0") for path in sorted(written, key=written.get)]
    assert order == list(gpu.ORDER)
    table = (tmp_path / "table1.md").read_text()
    assert re.search(r"\| collective \| \d+\.\d \| 82.59 ± 0.27 \| – \| 85.00 ± 0.34 \|", table)
    assert re.search(r"\| dense \| \d+\.\d \| 87.46 ± 0.31 \|", table)
    assert gpu.main(words) == 0
    assert written == {path: path.stat().st_mtime_ns for path in written}


def test_what_is_packed_is_the_data_and_the_installed_versions_for_the_other_machine(tmp_path, monkeypatch):
    (tmp_path / "data" / "cifar10").mkdir(parents=True)
    (tmp_path / "data" / "cifar10" / "train.parquet").write_bytes(b"images")
    commands = []
    monkeypatch.setattr(gpu.subprocess, "run", lambda command, check: commands.append(command))
    assert gpu.main(["pack", str(tmp_path / "out"), "--data", str(tmp_path / "data"), "--python", "3.12"]) == 0
    assert (tmp_path / "out" / "data" / "cifar10" / "train.parquet").read_bytes() == b"images"
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert command[command.index("--python-version") + 1] == "3.12"
    assert command[command.index("--target") + 1] == str(tmp_path / "out" / "site")
    assert sum(word.startswith("pydantic") and "==" in word for word in command) == 2
