"""The runs of a table or figure."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from sharding.errors import UserError, lookup
from sharding.terms.strategies import STRATEGIES
from train.config.schema import Config, load_config
from train.report.tables.layout import CONFIGS, EXPERIMENTS, SCALES, Setting, Table

TABLE_KEYS = {  # keys that a table sets
    "strategy": "choose with --only",
    "seed": "use --seeds",
    "keep_ratio": "choose with --only",
    "output": "use --output",
}


@dataclass(frozen=True)
class Cell:
    """One run: a setting, a strategy and a seed.

    Attributes:
        name: ``experiment/setting/strategy-seed``, which is also its folder; without commas, which divide patterns.
    """

    setting: Setting
    strategy: str
    seed: int
    name: str
    config: Config


def cells_of(
    table: Table, scale: str, into: Path, seeds: Sequence[int] | None = None, overrides: Sequence[str] = ()
) -> list[Cell]:
    """Return the runs of a table or figure, seed by seed, so that an interrupted table is complete for its first seeds.

    The scale is ``small``, ``medium`` or ``paper``; its seeds can be replaced; `into` will hold `cells/`. Raise a
    UserError for another scale, or an override that is not allowed.
    """
    configured = lookup(SCALES, scale, "scale")
    for key in (override.partition("=")[0] for override in overrides):
        if key in TABLE_KEYS:
            raise UserError(f"{key} is set by the table itself; {TABLE_KEYS[key]}")
    return [
        _cell(setting, strategy, seed, scale, into, overrides)
        for seed in dict.fromkeys(configured.seeds if seeds is None else seeds)
        for setting in table.settings()
        for strategy in table.strategies
    ]


def choose(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """Return the cells to run, each folder once: those that the patterns match, in their order, or else all.

    Raise a UserError if a pattern matches no cell.
    """
    distinct = list({cell.name: cell for cell in cells}.values())
    chosen: dict[str, Cell] = {}
    for pattern in patterns or ["*"]:
        matching = {cell.name: cell for cell in distinct if fnmatch(cell.name, f"*{pattern}*")}
        if not matching:
            raise UserError(f"--only {pattern} matches none of the {len(distinct)} cells, such as {distinct[0].name}")
        chosen = chosen | matching
    return list(chosen.values())


def _cell(setting: Setting, strategy: str, seed: int, scale: str, into: Path, overrides: Sequence[str]) -> Cell:
    path = CONFIGS / f"{setting.experiment}.yaml"
    base = [*EXPERIMENTS[setting.experiment].stand_ins.get(scale, ()), *overrides]
    plain = load_config(path, base)
    changes = setting.variant.changes(plain.rounds)
    varied = [override for override in changes if load_config(path, [*base, override]) != plain]
    whole = sends_full_model(strategy)
    ratio = [] if whole else [f"keep_ratio={setting.keep_ratio}"]
    name = f"{setting.experiment}/{'_'.join([_short(setting.keep_ratio, whole), *varied])}/{strategy}-{seed}"
    config = load_config(path, [*base, *varied, *ratio, f"strategy={strategy}", f"seed={seed}"])
    return Cell(setting, strategy, seed, name, config.model_copy(update={"output": into / "cells" / name}))


def sends_full_model(strategy: str) -> bool:
    """Return whether clients train the whole model, so that one run serves all keep ratios."""
    definition = STRATEGIES[strategy]
    return definition.allocate is None or definition.keep_ratio is not None


def _short(keep_ratio: str, whole: bool) -> str:
    return "whole" if whole else "r" + keep_ratio.strip("{}").replace(": ", "x").replace(", ", "+")
