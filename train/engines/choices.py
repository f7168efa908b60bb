"""Which of several equivalent ways to compute in: by rule, from what is computed.

Ways that compute the same differ in their rounding, so a choice is part of a run's result. It therefore follows from
shapes and device alone. The numbers in the rules are fitted on measurements, `benchmarks/choices.py`. Who wants a
machine's own choices instead has them timed once, at the start of a run (`ways=timed`); either way the run's directory
records them, and a resumed run keeps them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from time import perf_counter, process_time

import torch

UNFOLDED = 40_000  # numbers in a client's unfolded patches up to which one matrix product over them is fastest
GROUPED = 200_000  # likewise for one convolution in groups, which also wants whole vectors of channels
VECTOR = 16
BUSY = 8e6  # operations of a client in one layer from which a core gains nothing by taking clients together
REPEATS = 3


@dataclass(frozen=True)
class Choices:
    """The ways that a run has chosen, each by what it was chosen for.

    Attributes:
        together: whether clients are trained as one folded model, by keep ratio.
        convolutions: a name in `train.engines.convolution.WAYS`, by the shapes of one client.
        timed: whether to time what is not chosen yet; by rule if not.
    """

    together: dict[str, bool] = field(default_factory=dict)
    convolutions: dict[str, str] = field(default_factory=dict)
    timed: bool = False


def convolution_way(batch: Sequence[int], filters: Sequence[int], size: Sequence[int], device: str) -> str:
    """Return the way for a client's batch (B, in, H, W), filters (out, in, kh, kw), and the size of what comes out."""
    if device != "cpu":
        return "grouped"  # one kernel; not measured
    patches, (out, into) = batch[0] * prod(filters[1:]) * prod(size), filters[:2]
    whole_vectors = out % VECTOR == 0 and patches <= GROUPED
    if patches <= UNFOLDED and not (whole_vectors and into % VECTOR == 0):
        return "unfolded"
    return "grouped" if into == 1 or whole_vectors else "looped"


def pays_together(operations: int, layers: int, device: str) -> bool:
    """Tell whether to train clients together that do so many operations each in a step forward, in so many layers."""
    return device != "cpu" or operations < BUSY * layers


def fastest(ways: Mapping[str, Callable[[], object]], margin: float = 0.0) -> str:
    """Return the name of the fastest way, by the best of a few interleaved runs.

    Args:
        ways: by name; each is called several times, the first time uncounted.
        margin: the share of the first way's time that another must save to be taken instead of it.
    """
    seconds = measure(ways)
    first, best = next(iter(seconds)), min(seconds, key=seconds.__getitem__)
    return best if seconds[best] < (1 - margin) * seconds[first] else first


def measure(ways: Mapping[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, float]:
    """Return the least seconds of each way; the first run of each is not counted."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    clock = process_time if alone else perf_counter  # the former does not count what other processes take
    seconds = dict.fromkeys(ways, float("inf"))
    for repeat in range(repeats + 1):
        for name, way in ways.items():
            start = clock()
            way()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if repeat:
                seconds[name] = min(seconds[name], clock() - start)
    return seconds
