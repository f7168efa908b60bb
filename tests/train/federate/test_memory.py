"""The server's memory does not grow with the cohort."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
def test_server_peak_memory_of_32_clients_exceeds_that_of_4_by_less_than_two_shards(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(BENCHMARKS)
    few, many = importlib.import_module("federation_memory").measure([4, 32], layers=6)
    assert many["exchange_peak_bytes"] - few["exchange_peak_bytes"] < 2 * many["shard_bytes"]
