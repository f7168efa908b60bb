"""Keys of the command line that no run reads, such as the design of a strategy that does not draw."""

from collections.abc import Callable, Iterable, Sequence
from math import inf

import numpy as np

from sharding.errors import UserError, join_first
from sharding.terms.strategies import STRATEGIES, Allocation, LayerContext, get_strategy
from train.config.overrides import settings
from train.config.schema import Config

EXAMPLE = LayerContext(np.array([2.0, 1.5, 1.0, 0.5]), 2, 2, 0.5)


def refuse_unread(configs: Sequence[Config], overrides: Iterable[str]) -> None:
    """Raise a UserError for a key that was set, or varied in a grid, and that none of these runs reads.

    It has the value, the reason and the remedy. A file may have such keys: several runs share it.
    """
    parts = [one for config in configs for one in config.models()]
    for key, override in settings(overrides):
        reads = READERS.get(key, lambda _: True)
        if any(reads(part) for part in parts):
            continue
        if key == "local.epochs":
            raise UserError(f"{override} does nothing where local.steps={parts[0].local.steps}; remove one of them")
        if key == "local.decay_of" and not parts[0].local.decay:
            raise UserError(f"{override} does nothing where local.decay=0; remove it")
        names = [name for name in STRATEGIES if reads(parts[0].model_copy(update={"strategy": name}))]
        raise UserError(
            f"{override} does nothing where strategy={parts[0].strategy}; remove it, or use it with strategy="
            f"{join_first(names, 10)}"
        )


def _example(config: Config) -> Allocation | None:
    allocate = get_strategy(config.strategy).allocate
    return None if allocate is None else allocate(EXAMPLE)


def _draws(config: Config) -> bool:
    """Whether a design draws the terms: they are neither certain, nor drawn in the strategy's own way."""
    example = _example(config)
    return example is not None and example.weights is None and bool(np.modf(example.inclusion)[0].any())


def _clips(config: Config) -> bool:
    example, strategy = _example(config), get_strategy(config.strategy)
    weighted = example is not None and (strategy.rescales or bool((example.multipliers != 1).any()))
    return config.local.clip == inf or (weighted and strategy.clips)


def _has_terms(config: Config) -> bool:
    return get_strategy(config.strategy).allocate is not None


def _chooses_size(config: Config) -> bool:
    return _has_terms(config) and get_strategy(config.strategy).keep_ratio is None


READERS: dict[str, Callable[[Config], bool]] = {  # whether a run reads a key
    "design": _draws,
    "keep_ratio": _chooses_size,
    "init": _chooses_size,
    "tail": lambda config: config.tail is None or get_strategy(config.strategy).nested,
    "skip": _has_terms,
    "local.clip": _clips,
    "local.decay": lambda config: config.local.decay == 0 or _has_terms(config),
    "local.decay_of": lambda config: config.local.decay > 0 and _has_terms(config),
    "local.epochs": lambda config: config.local.steps is None,
}
