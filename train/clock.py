"""Time the phases of a round."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

from train.metrics import RoundMetrics


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

    def write_to(self, metrics: RoundMetrics) -> None:
        """Set ``seconds`` since the clock was made, and ``seconds_<phase>`` of each phase."""
        metrics.seconds = perf_counter() - self._start
        for name, seconds in self._phases.items():
            setattr(metrics, name, seconds)
