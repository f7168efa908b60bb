"""Callbacks, which act after each round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sharding import Plan
from train.experiment.experiment import Experiment
from train.experiment.metrics import RoundMetrics

Plans = Plan | Mapping[str, Plan]  # of one model, or by name of several


class Callback:
    """Acts on a run's rounds; a subclass overrides what it needs. The order of callbacks does not matter."""

    def before_training(self, experiment: Experiment) -> None:
        """Act on each model of a run, before the first round of this process. An exception ends the run."""

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> bool | None:
        """Act on a finished round, and return True to end the run with it. An exception ends the run as failed.

        Args:
            metrics: the metrics of the round.
            plan: the shards that were sent; where a run trains several models, the plan of each, by name.
        """

    def close(self, failed: bool = False) -> None:
        """Flush and release resources; `failed` is true if the run raised an error."""


class EachRound(Callback):
    """Passes each round's metrics to a function, as a dictionary."""

    def __init__(self, show: Callable[[dict[str, Any]], object]) -> None:
        self._show = show

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> None:
        """Pass the metrics on."""
        self._show(metrics.to_dict())


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
