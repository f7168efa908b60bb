"""Registries of losses, optimizers and schedules; import of modules that register your own parts.

A module adds parts to a registry (`STRATEGIES`, `DESIGNS`, `SAMPLERS`, `MODELS`, `DATASETS`, `PARTITIONS`, `TRACKERS`,
`LOSSES`, `OPTIMIZERS`, `SCHEDULES`). Name the module with `plugins=[module]` or ``--import module``.
"""

import importlib
from collections.abc import Callable, Sequence
from math import cos, pi
from typing import Protocol

from torch import Tensor
from torch.nn import functional as F

from sharding.errors import UserError
from sharding.optim import LocalSGD


class LocalOptimizer(Protocol):
    """The optimizer of one client in one round."""

    def step(self, loss: Tensor) -> None:
        """Take one step that lowers a loss, a differentiable scalar."""
        ...


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int, reduction: str = "mean") -> Tensor:
    """Cross-entropy of logits (…, classes) against targets (…)."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction=reduction)


def cosine(lr: float, t: int, rounds: int) -> float:
    """Return the learning rate of round t: half a cosine from `lr` at round 0 towards 0 at round `rounds`."""
    return lr * (1 + cos(pi * t / rounds)) / 2


def constant(lr: float, t: int, rounds: int) -> float:
    """Return the same learning rate in every round."""
    return lr


def inverse(lr: float, t: int, rounds: int) -> float:
    """Return lr/(1 + t), the decay of Luo et al. 2024 (arXiv 2404.13804)."""
    return lr / (1 + t)


# (logits, targets, the target to ignore) -> a scalar.
LOSSES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"cross_entropy": cross_entropy}
# (model, lr, momentum, frobenius_decay, clip, decay_of, and `local.optimizer_options`) -> an optimizer.
OPTIMIZERS: dict[str, Callable[..., LocalOptimizer]] = {"sgd": LocalSGD}
# (local.lr, round, rounds) -> the round's learning rate.
SCHEDULES: dict[str, Callable[[float, int, int], float]] = {"cosine": cosine, "constant": constant, "inverse": inverse}


def import_parts(modules: Sequence[str]) -> None:
    """Import modules that register parts.

    Raises:
        UserError: a module does not exist or cannot be imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise UserError(
                f"cannot import {module!r} ({why}); name a module as in Python, e.g. my_module or a.b"
            ) from error
