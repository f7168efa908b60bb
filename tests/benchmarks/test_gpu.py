"""The GPU's one command, from end to end on a CPU at a tiny scale."""

import re

from benchmarks import gpu
from tests.train.test_runs import TINY


def test_the_column_is_run_in_its_order_and_not_run_again(tmp_path):
    words = [str(tmp_path), *TINY, "data.name=digits", "local.batch_size=8", "device=cpu"]
    assert gpu.main(words) == 0
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("cells/*/*/*/metrics.jsonl")}
    order = [path.parent.name.removesuffix("-0") for path in sorted(written, key=written.get)]
    assert order == list(gpu.ORDER)
    table = (tmp_path / "table1.md").read_text()
    assert re.search(r"\| collective \| \d+\.\d \| 82.59 ± 0.27 \| – \| 85.00 ± 0.34 \|", table)
    assert re.search(r"\| dense \| \d+\.\d \| 87.46 ± 0.31 \|", table)
    assert gpu.main(words) == 0
    assert written == {path: path.stat().st_mtime_ns for path in written}
