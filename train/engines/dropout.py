"""Dropout whose masks depend only on (seed, round, client), the step, the sample and the place.

torch draws dropout from one stream of the device, so that a mask depends on everything drawn before it. Here every
number is a hash of its key (a counter-based generator), so it is the same on CPU and GPU and in any batch.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sharding.rng import seed_of

GOLDEN = -0x61C88647  # 2³² / golden ratio, odd, as a signed number: consecutive multiples are far apart


class Masks:
    """The masks of one model: `begin` a step, then every dropout in it draws from its samples' own streams."""

    def __init__(self) -> None:
        self._seeds: Tensor | None = None
        self._calls = 0

    def begin(self, seeds: Tensor) -> None:
        """Start a step whose samples have these seeds, shape (samples,), int64."""
        self._seeds, self._calls = seeds, 0

    @property
    def samples(self) -> int:
        """The number of samples in this step."""
        assert self._seeds is not None, "a step begins with its seeds"
        return len(self._seeds)

    def keep(self, sample_shape: Sequence[int], rate: float) -> Tensor:
        """Return for each sample which elements stay, boolean, shape (samples, *sample_shape)."""
        assert self._seeds is not None, "a step begins with its seeds"
        return self._keep(self._seeds, sample_shape, rate)

    def keep_whole(self, shape: Sequence[int], rate: float) -> Tensor:
        """Return a mask of a tensor whose first axis is not the samples'; it uses the first sample's stream."""
        assert self._seeds is not None, "a step begins with its seeds"
        return self._keep(self._seeds[:1], shape, rate)[0]

    def _keep(self, seeds: Tensor, sample_shape: Sequence[int], rate: float) -> Tensor:
        self._calls += 1
        streams = _mix(seeds.to(torch.int32) + self._calls * 0x3C6EF35)[:, None]
        strides = _mix((seeds >> 32).to(torch.int32) ^ self._calls)[:, None] | 1
        threshold = min(int(rate * 2**32) - 2**31, 2**31 - 1)
        places = _places(prod(sample_shape), seeds.device)
        return (_mix((places ^ streams).mul_(strides)) >= threshold).view(-1, *sample_shape)


class KeyedDropout(nn.Module):
    """`nn.Dropout` with keyed masks."""

    def __init__(self, rate: float, masks: Masks) -> None:
        super().__init__()
        self.rate, self.masks = rate, masks

    def forward(self, x: Tensor) -> Tensor:
        """Zero elements in training and scale up the rest."""
        return _drop(x, self.masks, x.shape[1:], self.rate) if self.training and self.rate else x


class KeyedDropPath(KeyedDropout):
    """Stochastic depth (timm's `DropPath`) with keyed masks: whole samples are zeroed."""

    def forward(self, x: Tensor) -> Tensor:
        """Zero samples in training and scale up the rest."""
        return _drop(x, self.masks, [1] * (x.dim() - 1), self.rate) if self.training and self.rate else x


def key_dropout(model: nn.Module) -> Masks:
    """Give the dropouts of a model keyed masks, in place, and return the masks.

    This covers the modules `nn.Dropout` and timm's `DropPath`. Other draws of a model still use torch's global
    generator.
    """
    masks = next((module.masks for module in model.modules() if isinstance(module, KeyedDropout)), Masks())
    keyed: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, module in parent._modules.items():
            if type(module) is nn.Dropout:
                parent._modules[name] = keyed.setdefault(module, KeyedDropout(module.p, masks).train(module.training))
            elif module is not None and name_of(module) == "timm.layers.drop.DropPath":
                rate: Any = module.drop_prob
                parent._modules[name] = keyed.setdefault(module, KeyedDropPath(rate, masks).train(module.training))
    return masks


def name_of(module: nn.Module) -> str:
    """Return the full name of a module's class, which identifies timm's classes without the slow import of timm."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def sample_seeds(steps: int, batch_size: int, key: tuple[int | str, ...]) -> Tensor:
    """Return a seed for each place in each batch, (steps, batch_size), int64; `key` is (seed, round, client)."""
    first = np.uint64(seed_of("dropout", *key))
    places = np.arange(steps, dtype=np.uint64)[:, None] << np.uint64(32) | np.arange(batch_size, dtype=np.uint64)
    return torch.from_numpy(_splitmix(places * np.uint64(0x9E3779B97F4A7C15) + first).view(np.int64))


def _drop(x: Tensor, masks: Masks, sample_shape: Sequence[int], rate: float) -> Tensor:
    kept = masks.keep(sample_shape, rate) if len(x) == masks.samples else masks.keep_whole(x.shape, rate)
    return x * kept.to(x.dtype).div_(1 - rate)


@lru_cache(maxsize=64)
def _places(count: int, device: torch.device) -> Tensor:
    """Return 0, 1, …, each times the golden ratio, int32."""
    return torch.arange(count, dtype=torch.int32, device=device) * GOLDEN


def _mix(x: Tensor) -> Tensor:
    """Hash int32 to int32, in place: the finalizer of MurmurHash3 (Appleby), whose shifts are unsigned."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(-0x7A143595)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(-0x3D4D51CB)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _splitmix(x: np.ndarray) -> np.ndarray:
    """Hash uint64 to uint64: the finalizer of SplitMix64 (Steele, Lea & Flood, OOPSLA 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
