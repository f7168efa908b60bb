"""Time the phases of a round."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch


class Clock:
    """Times the phases of one round: ``with clock("plan"): …``."""

    def __init__(self) -> None:
        self._start = perf_counter()
        self._phases: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time what happens inside the `with`."""
        start = perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # between phases only, never within one
        self._phases[f"seconds_{phase}"] += perf_counter() - start

    def seconds(self) -> dict[str, Any]:
        """Return ``seconds`` since the clock was made, and ``seconds_<phase>`` of each phase."""
        return {"seconds": perf_counter() - self._start, **self._phases}
