"""Callbacks, which act after each round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sharding import Plan
from train.rundir.records import Layers, laws_of


@dataclass
class FinishedRound:
    """A finished round, as passed to callbacks.

    Attributes:
        number: t, from 0.
        metrics: of the round; a callback may add to them for the callbacks after it.
        plans: the shards that were sent, by model.
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
        """The strategy's decisions for each layer, by model; without models that were sent whole."""
        return {name: laws_of(plan) for name, plan in self.plans.items() if plan.spectra}


class Callback:
    """Acts on a run's rounds; a subclass overrides what it needs. Callbacks are called in their order."""

    def after_round(self, done: FinishedRound) -> None:
        """Act on a finished round. An exception ends the run."""

    def close(self, failed: bool = False) -> None:
        """Flush and release resources; `failed` says that the run was interrupted or raised an error."""


class EachRound(Callback):
    """Passes each round's metrics to a function."""

    def __init__(self, show: Callable[[dict[str, Any]], object]) -> None:
        self._show = show

    def after_round(self, done: FinishedRound) -> None:
        """Pass the metrics on."""
        self._show(done.metrics)


@contextmanager
def closing(callbacks: Sequence[Callback]) -> Iterator[Sequence[Callback]]:
    """Close all callbacks at the end, with `failed` if an exception ended the run."""
    failed = True
    try:
        yield callbacks
        failed = False
    finally:
        for callback in callbacks:
            callback.close(failed)
