"""What happens after each round, apart from the algorithm: one class for each thing that looks on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sharding import Plan
from train.rundir.records import Layers, laws_of


@dataclass
class FinishedRound:
    """A round that is over, as callbacks see it.

    Attributes:
        number: t, from 0.
        metrics: of the round; a callback may add to them for the callbacks after it.
        plans: what was sent, by model.
        last: whether the run ends with this round. `EarlyStop` sets it before the round is written; a callback that
            sets it later ends the run without a checkpoint of this round.
        interrupted: whether the run was asked to stop after this round.
    """

    number: int
    metrics: dict[str, Any]
    plans: Mapping[str, Plan]
    last: bool = False
    interrupted: bool = False

    @cached_property
    def layers(self) -> dict[str, Layers]:
        """What the strategy decided for each layer, by model; nothing of a model that was sent whole."""
        return {name: laws_of(plan) for name, plan in self.plans.items() if plan.spectra}


class Callback:
    """Looks on at a run; a subclass overrides what it is interested in. Callbacks are called in their order."""

    def after_round(self, done: FinishedRound) -> None:
        """Act on a finished round. An exception ends the run."""

    def close(self, failed: bool = False) -> None:
        """Flush and release what is held; `failed` where the run was interrupted or broke off."""


class EachRound(Callback):
    """Passes each round's metrics to a function."""

    def __init__(self, show: Callable[[dict[str, Any]], object]) -> None:
        self._show = show

    def after_round(self, done: FinishedRound) -> None:
        """Pass the metrics on."""
        self._show(done.metrics)


@contextmanager
def closing(callbacks: Sequence[Callback]) -> Iterator[Sequence[Callback]]:
    """Close all callbacks in the end, with `failed` where an exception ended the run."""
    failed = True
    try:
        yield callbacks
        failed = False
    finally:
        for callback in callbacks:
            callback.close(failed)
