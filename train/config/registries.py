"""Registries of losses, optimizers, schedules and trackers; import of modules that register your own parts.

A module adds parts to a registry (`STRATEGIES`, `DESIGNS`, `SAMPLERS`, `MODELS`, `DATASETS`, `PARTITIONS`, `TRACKERS`,
`LOSSES`, `OPTIMIZERS`, `SCHEDULES`, `SERVER_OPTIMIZERS`). Name the module with `plugins=[module]` or ``--import``.
"""

import importlib
from collections.abc import Callable, Iterable, Sequence
from math import cos, pi
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

from sharding.errors import UserError
from sharding.optim import DecayOf, LocalSGD


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


def sgd(model: nn.Module, decay: float, clip: float | None, decay_of: DecayOf, lr: float, momentum: float = 0.0) -> Any:
    """SGD with momentum, which starts at zero in each round."""
    return LocalSGD(model, lr, momentum, decay, clip, decay_of)


def plain(parameters: Iterable[Tensor], lr: float = 1.0) -> Optimizer:
    """FedAvg, with a learning rate η_g: W ← W + η_g Δ."""
    return SGD(parameters, lr)


def momentum(parameters: Iterable[Tensor], lr: float = 1.0, momentum: float = 0.9) -> Optimizer:
    """FedAvgM: m ← βm + Δ, W ← W + η_g m. Hsu, Qi & Brown 2019 (arXiv 1909.06335)."""
    return SGD(parameters, lr, momentum)


def nesterov(parameters: Iterable[Tensor], lr: float = 0.4, momentum: float = 0.8) -> Optimizer:
    """FedACG: clients are sent W + η_g βm, the point that the server expects to reach next. Kim et al., CVPR 2024."""
    return SGD(parameters, lr, momentum, nesterov=True)


def fedadam(
    parameters: Iterable[Tensor], lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-3
) -> Optimizer:
    """FedAdam: Adam with the constants of Reddi et al., "Adaptive Federated Optimization", ICLR 2021."""
    return Adam(parameters, lr, betas, eps)


# (logits, targets, the target to ignore) -> a scalar.
LOSSES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"cross_entropy": cross_entropy}
# (model, decay, clip, decay_of, and options, among them lr) -> an optimizer.
OPTIMIZERS: dict[str, Callable[..., Any]] = {"sgd": sgd}
# (the optimizer's lr, round, rounds, and options) -> the round's learning rate.
SCHEDULES: dict[str, Callable[..., float]] = {"cosine": cosine, "constant": constant, "inverse": inverse}
# (parameters, and options) -> the server's optimizer.
SERVER_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "plain": plain,
    "momentum": momentum,
    "nesterov": nesterov,
    "fedadam": fedadam,
}
# (the run's configuration, and options) -> a `train.callbacks.Callback`, or its dotted name.
TRACKERS: dict[str, Callable[..., Any] | str] = {"wandb": "train.callbacks.wandb_run.WandbRun"}


def import_parts(modules: Sequence[str]) -> None:
    """Import modules that register parts.

    Raises:
        UserError: a module does not exist or cannot be imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"cannot import {module!r} ({reason}); name a module as in Python, e.g. my_module or a.b"
            ) from error
