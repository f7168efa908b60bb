"""The content of each table and figure, and the published values, from `layout.yaml`.

A table crosses settings (experiment × keep ratio × variant) with strategies; a figure draws some of the same runs as
curves. They share their runs: a cell runs once for all tables and figures.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from pydantic import Field

from sharding.errors import lookup
from train.config.sections import KeepRatio
from train.config.values import Section
from train.config.yaml_text import read_yaml

LAYOUT_FILE = Path(__file__).with_name("layout.yaml")
CONFIGS = Path(__file__).parents[2] / "configs"
Variants = dict[str, list[str]]  # label -> overrides; ``rounds*=10/3`` multiplies the scale's rounds
Published = dict[str, dict[str, list[float]]]  # keep ratio -> strategy -> [mean, standard deviation], in %


@dataclass(frozen=True)
class Setting:
    """One column of a table: an experiment at a keep ratio, possibly varied.

    Attributes:
        experiment: stem of a file in `configs/`.
        keep_ratio: as the config key takes it, in YAML.
        variant: its label, or empty.
        overrides: of the variant.
    """

    experiment: str
    keep_ratio: str
    variant: str = ""
    overrides: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The keep ratio and the variant, for people."""
        return ", ".join(part for part in (f"r = {self.keep_ratio}", self.variant) if part)


class Experiment(Section):
    """A published experiment, `configs/<name>.yaml`, and the overrides that turn it into a stand-in.

    Attributes:
        stand_ins: scale -> overrides; other scales run the published experiment itself.
    """

    title: str
    stand_ins: dict[str, list[str]]


class Scale(Section):
    """The size and the seeds of the runs."""

    title: str
    seeds: list[int]


class Matrix(Section):
    """A table of test accuracies: settings × strategies."""

    title: str
    experiments: list[str]
    keep_ratios: list[KeepRatio]
    strategies: list[str]
    variants: Variants = Field(default_factory=dict)

    def settings(self) -> list[Setting]:
        """Return all settings, experiment by experiment."""
        variants = self.variants or {"": []}
        return [
            Setting(experiment, _plain(ratio), label, tuple(overrides))
            for experiment, ratio, (label, overrides) in product(self.experiments, self.keep_ratios, variants.items())
        ]


class Panel(Section):
    """One panel of a figure: a metric of `metrics.jsonl` against rounds or bytes.

    Attributes:
        smooth: weight of the past in an exponentially weighted moving average; 0 draws the values as they are.
    """

    x: Literal["rounds", "bytes_total"] = "rounds"
    y: str
    smooth: float = Field(0.0, ge=0, lt=1)


class Figure(Matrix):
    """A figure: panels of curves, one row of panels a setting."""

    panels: list[Panel]


class Layout(Section):
    """All of `layout.yaml`.

    Attributes:
        published: by experiment; the keep ratio ``any`` stands for all.
        published_variants: experiment -> keep ratio -> override -> strategy -> as above.
    """

    scales: dict[str, Scale]
    experiments: dict[str, Experiment]
    tables: dict[str, Matrix]
    figures: dict[int, Figure]
    published: dict[str, Published]
    published_variants: dict[str, dict[str, Published]] = Field(default_factory=dict)

    def find(self, name: str) -> Matrix:
        """Return the table ``3`` or ``longer``, or the figure ``figure3``, or raise a `UserError`."""
        return lookup(
            self.tables | {f"figure{number}": figure for number, figure in self.figures.items()}, name, "table"
        )

    def published_of(self, setting: Setting, strategy: str) -> Sequence[float] | None:
        """Return the published mean (and deviation) of a cell, in %, or None if unknown."""
        if setting.overrides:
            of_variants = self.published_variants.get(setting.experiment, {}).get(setting.keep_ratio, {})
            return of_variants.get(",".join(setting.overrides), {}).get(strategy)
        of_experiment: Mapping[str, Mapping[str, list[float]]] = self.published.get(setting.experiment, {})
        return of_experiment.get(setting.keep_ratio, {}).get(strategy) or of_experiment.get("any", {}).get(strategy)


def load_layout(path: Path = LAYOUT_FILE) -> Layout:
    """Read the layout."""
    return Layout.model_validate(read_yaml(path))


def _plain(keep_ratio: float | Mapping[float, float]) -> str:
    """Return a keep ratio as the YAML that the config key takes."""
    if isinstance(keep_ratio, Mapping):
        return "{" + ", ".join(f"{ratio:g}: {share:g}" for ratio, share in keep_ratio.items()) + "}"
    return f"{keep_ratio:g}"
