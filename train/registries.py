"""All registries of parts, and the import of modules that register your own.

A module adds parts to a registry. Name the module with `plugins=[module]` or ``--import``.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from math import cos, pi
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from models import MODELS
from sharding import DESIGNS, SAMPLERS, STRATEGIES, FedYogi
from sharding.errors import UserError
from train.data import DATASETS
from train.data.partition import PARTITIONS

__all__ = [
    "DATASETS",
    "DESIGNS",
    "LOSSES",
    "MODELS",
    "OPTIMIZERS",
    "PARTITIONS",
    "SAMPLERS",
    "SCHEDULES",
    "SERVER_OPTIMIZERS",
    "STRATEGIES",
    "TRACKERS",
]


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int, reduction: str = "mean") -> Tensor:
    """Cross-entropy of logits (…, classes) against targets (…)."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, reduction=reduction)


def cosine(lr: float, t: int, rounds: int) -> float:
    """Return the learning rate of round t: half a cosine from `lr` at round 0 toward 0 at round `rounds`."""
    return lr * (1 + cos(pi * t / rounds)) / 2


def constant(lr: float, t: int, rounds: int) -> float:
    """Return the same learning rate in every round."""
    return lr


def inverse(lr: float, t: int, rounds: int) -> float:
    """Return lr/(1 + t), the decay of Luo et al. 2024 (arXiv 2404.13804)."""
    return lr / (1 + t)


def plain(parameters: Iterable[Tensor], lr: float = 1.0) -> Optimizer:
    """Return FedAvg's optimizer: W ← W + η_g Δ."""
    return torch.optim.SGD(parameters, lr)


def momentum(parameters: Iterable[Tensor], lr: float = 1.0, momentum: float = 0.9) -> Optimizer:
    """Return FedAvgM's optimizer (Hsu, Qi & Brown 2019, arXiv 1909.06335)."""
    return torch.optim.SGD(parameters, lr, momentum)


def nesterov(parameters: Iterable[Tensor], lr: float = 0.4, momentum: float = 0.8) -> Optimizer:
    """Return FedACG's optimizer (Kim et al., CVPR 2024): clients are sent the point that the server expects next."""
    return torch.optim.SGD(parameters, lr, momentum, nesterov=True)


def fedadam(
    parameters: Iterable[Tensor], lr: float = 0.01, betas: tuple[float, float] = (0.9, 0.99), eps: float = 1e-3
) -> Optimizer:
    """Return FedAdam's optimizer (Reddi et al., ICLR 2021)."""
    return torch.optim.Adam(parameters, lr, betas, eps)


# (logits, targets, the target to ignore) -> a scalar.
LOSSES: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {"cross_entropy": cross_entropy}
# (parameters, and torch's other arguments) -> an optimizer, of a client or of the server.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "adafactor": torch.optim.Adafactor,
    "rmsprop": torch.optim.RMSprop,
}
# (the optimizer's lr, round, rounds, and options) -> the round's learning rate.
SCHEDULES: dict[str, Callable[..., float]] = {"cosine": cosine, "constant": constant, "inverse": inverse}
# (parameters, and torch's other arguments) -> the optimizer of the pseudo-gradient; see `sharding.rounds.server`.
SERVER_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "plain": plain,
    "momentum": momentum,
    "nesterov": nesterov,
    "fedadam": fedadam,
    "fedyogi": FedYogi,
    **OPTIMIZERS,
}
# (the run's configuration, and options) -> a `train.callbacks.Callback`, or its dotted name.
TRACKERS: dict[str, Callable[..., Any] | str] = {"wandb": "train.callbacks.wandb_run.WandbRun"}


def import_parts(modules: Sequence[str]) -> None:
    """Import modules that register parts, or raise a UserError that names the one that cannot be imported."""
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            package = module.partition(".")[0]
            source = getattr(sys.modules.get(package), "__file__", None)
            where = f"; the package {package} is that of {source}" if source and package != module else ""
            raise UserError(
                f"cannot import {module!r} ({reason}{where}); name a module as in Python, e.g. my_module or a.b"
            ) from error
