"""What benchmarks measure with: the time of a call, and the memory of a program and of all that it starts.

Memory is the proportional set size, which counts shared memory once. Linux only.
"""

import json
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TypeVar

import pandas as pd
import torch

Result = TypeVar("Result")

MARK = "MEMORY_MARK"  # an environment variable, which children inherit


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call, with its work on the GPU, after one call that is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[1:])


def save(path: Path, results: Mapping[str, object]) -> None:
    """Write results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def save_rows(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write results as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(path, index=False)


def in_new_process(function: Callable[..., Result], *args: object) -> Result:
    """Call a function in a process that has computed nothing before."""
    with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
        return fresh.submit(function, *args).result()


def run_and_watch(
    command: Sequence[str], environment: Mapping[str, str], folder: Path | None = None, interval: float | None = 0.5
) -> tuple[list[str], float]:
    """Return a command's printed lines and its peak memory in MB; raise a RuntimeError if it fails."""
    mark, peak = uuid.uuid4().hex, 0
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env={**environment, MARK: mark}, cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
        while interval is not None and process.poll() is None:
            peak = max(peak, memory_of(mark))
            time.sleep(interval)
        process.wait()
        log.seek(0)
        lines = log.read().splitlines()
    if process.returncode:
        raise RuntimeError(f"{command} failed with exit code {process.returncode}:\n" + "\n".join(lines[-30:]))
    return lines, peak / 2**20


def memory_of(mark: str) -> int:
    """Return the bytes of all processes with the mark in their environment."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                rollup = (folder / "smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in rollup if line.startswith("Pss:")) * 1024
        except OSError:  # it has just ended, or belongs to another user
            continue
    return total


def resident(field: str) -> int:
    """Return the bytes of this process's memory now (`VmRSS`) or at its peak (`VmHWM`)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) * 1024


def forget_peak() -> None:
    """Let the peak of this process's memory start from what it takes now."""
    Path("/proc/self/clear_refs").write_text("5")
