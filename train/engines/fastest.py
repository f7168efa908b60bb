"""Which of several equivalent ways is the fastest here: measured once on a machine, then remembered.

Ways that compute the same differ in their rounding. The choice is therefore kept in a file, as FFTW keeps its wisdom:
the first process to measure decides for all, so that a second run, a worker, or a resumed run rounds as the first did.
The files lie in ``$SPECTRAL_SHARDING_CACHE``, by default ``~/.cache/spectral-sharding``; each says what it is about.
"""

import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import NamedTemporaryFile
from time import perf_counter, process_time

import torch

log = logging.getLogger(__name__)

REPEATS = 3
_chosen: dict[str, str] = {}


def fastest(subject: str, ways: Mapping[str, Callable[[], object]], margin: float = 0.0) -> str:
    """Return the name of the fastest way, by the best of a few interleaved runs; the first time on this machine only.

    Args:
        subject: what is done, with all that the time depends on (shapes, options, device).
        ways: by name; each is called several times.
        margin: the share of the first way's time that another must save to be taken instead of it.
    """
    subject = f"{subject} | {_machine()} | {torch.get_num_threads()} threads | margin {margin}"
    if subject not in _chosen:
        path = _folder() / blake2b(subject.encode(), digest_size=16).hexdigest()
        _chosen[subject] = _remembered(path, ways) or _remember(path, subject, _measure(ways), ways, margin)
    return _chosen[subject]


def choose(seconds: Mapping[str, float], margin: float) -> str:
    """Return the way with the least seconds, or the first where the least saves no more than the margin."""
    first, best = next(iter(seconds)), min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < (1 - margin) * seconds[first] else first


def _measure(ways: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the least seconds of each way; the first run of each is not counted."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    clock = process_time if alone else perf_counter  # the former does not count what other processes take
    seconds = {name: float("inf") for name in ways}
    for repeat in range(REPEATS + 1):
        for name, way in ways.items():
            start = clock()
            way()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:
                seconds[name] = min(seconds[name], clock() - start)
    return seconds


def _remembered(path: Path, ways: Mapping[str, Callable[[], object]]) -> str | None:
    try:
        choice = json.loads(path.read_text(encoding="utf-8"))["fastest"]
    except (OSError, ValueError, KeyError):
        return None
    return choice if choice in ways else None


def _remember(
    path: Path, subject: str, seconds: dict[str, float], ways: Mapping[str, Callable[[], object]], margin: float
) -> str:
    """Write the choice down, unless another process was first: then its choice holds."""
    choice = choose(seconds, margin)
    log.debug("%s: %s is the fastest of %s", subject, choice, seconds)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, encoding="utf-8") as file:
            json.dump({"subject": subject, "fastest": choice, "seconds": seconds}, file)
            file.flush()
            if path.exists() and _remembered(path, ways) is None:
                path.unlink()  # spoiled
            os.link(file.name, path)  # the whole file at once, and only if there is none
    except FileExistsError:
        return _remembered(path, ways) or choice
    except OSError as error:
        log.warning("cannot remember what is fastest in %s (%s): another run may round differently", path.parent, error)
    return choice


def _folder() -> Path:
    return Path(os.environ.get("SPECTRAL_SHARDING_CACHE", Path.home() / ".cache" / "spectral-sharding"))


@cache
def _machine() -> str:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {gpu}, torch {torch.__version__}"
