"""What the tables and figures of Korzhenkov & Louizos (NeurIPS 2024, arXiv 2410.24106) hold, and a table of our own.

A table crosses settings (experiment × keep ratio × variant) with strategies, and draws curves of the same runs; of a
figure the curves are what was published. They share their runs: a cell runs once for all tables and figures. What the
paper leaves open (the keep ratio of Figures 1, 3 and 4) is our choice.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path

CONFIGS = Path(__file__).parents[3] / "configs"


@dataclass(frozen=True)
class Scale:
    """The size and the seeds of the runs."""

    title: str
    seeds: Sequence[int]


@dataclass(frozen=True)
class PublishedExperiment:
    """A published experiment, `configs/<name>.yaml`.

    Attributes:
        title: the title for people.
        stand_ins: overrides by scale; other scales run the experiment itself.
    """

    title: str
    stand_ins: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Variant:
    """A change of an experiment.

    Attributes:
        label: the label for people.
        overrides: the overrides of the configuration.
        times: factor of the rounds, at any scale.
    """

    label: str = ""
    overrides: tuple[str, ...] = ()
    times: Fraction = Fraction(1)

    def changes(self, rounds: int) -> list[str]:
        """Return the overrides of a configuration with so many rounds."""
        longer = [f"rounds={round(rounds * self.times)}"] if self.times != 1 else []
        return [*longer, *self.overrides]


@dataclass(frozen=True)
class Setting:
    """One column of a table: an experiment at a keep ratio, as the configuration takes it, possibly varied."""

    experiment: str
    keep_ratio: str
    variant: Variant = Variant()

    @property
    def label(self) -> str:
        """The keep ratio and the variant, for people."""
        return ", ".join(filter(None, (f"r = {self.keep_ratio}", self.variant.label)))


@dataclass(frozen=True)
class Table:
    """A table of test accuracies, settings × strategies, and a row of panels of curves for each setting.

    Attributes:
        panels: the cost (`rounds` or `bytes_total`) and the metric of each.
    """

    title: str
    experiments: Sequence[str]
    strategies: Sequence[str]
    keep_ratios: Sequence[str] = ("0.1",)
    variants: Sequence[Variant] = (Variant(),)
    panels: Sequence[tuple[str, str]] = (("rounds", "test_accuracy"), ("bytes_total", "test_accuracy"))

    def settings(self) -> list[Setting]:
        """Return all settings, experiment by experiment."""
        return [Setting(*each) for each in product(self.experiments, self.keep_ratios, self.variants)]


SCALES = {
    "small": Scale("small stand-in: narrow models, few rounds, to see that it works", (0,)),
    "medium": Scale("medium stand-in: the paper's geometry, narrower, on smaller maps", (0, 1)),
    "paper": Scale("the published setting", (0, 1, 2)),
}

_ONE_EPOCH = ("local.epochs=1", "local.batch_size=16")
_400_ROUNDS = ("rounds=400", "evaluate_every=20", "local.epochs=1")
_RESNET = {
    "small": (
        *("model.width=16", "model.blocks=[1, 1, 1]", "model.groups=4", "model.stem_stride=2"),
        *("rounds=40", "evaluate_every=5", *_ONE_EPOCH),
    ),
    "medium": (
        *("model.width=32", "model.blocks=[1, 1, 1, 1]", "model.groups=16", "model.stem_stride=2"),
        *(*_400_ROUNDS, "alignment=true", "engine=sequential"),
    ),
}
_CCT = {
    "small": ("model.dim=64", "model.depth=2", "clients.per_round=5", "rounds=30", *_ONE_EPOCH),
    "medium": (*_400_ROUNDS, "engine=sequential"),
}
_GPT = {
    "small": ("model.width=64", "model.depth=2", "model.heads=4", "rounds=100", "evaluate_every=20"),
    "medium": ("rounds=300", "evaluate_every=20", "engine=sequential"),
}
EXPERIMENTS = {
    "cifar10_resnet18": PublishedExperiment("CIFAR-10 / ResNet", _RESNET),
    "tiny_imagenet_cct": PublishedExperiment("TinyImageNet / CCT", _CCT),
    "cifar100_resnet18": PublishedExperiment("CIFAR-100 / ResNet", _RESNET),
    "cifar100_cct": PublishedExperiment("CIFAR-100 / CCT", _CCT),
    "shakespeare_gpt": PublishedExperiment("Shakespeare / GPT", _GPT),
}

_SHARDED = (
    *("top_n", "top_n_scaled", "prism", "prism_scaled", "prism_wallenius", "prism_wallenius_clip"),
    *("unbiased", "collective"),
)
_BEST = ("top_n", "prism_wallenius_clip", "unbiased", "collective")
_RESNET_AND_CCT = ("cifar100_resnet18", "cifar100_cct")
TABLES = {
    "1": Table(
        "Accuracy under a limited computational budget",
        tuple(EXPERIMENTS),
        (*_SHARDED, "full", "dense"),
        ("0.1", "0.2", "{0.2: 0.6, 0.4: 0.4}"),
    ),
    "2": Table(
        "Longer training",
        ("cifar100_resnet18",),
        _SHARDED,
        variants=(Variant("1,500 rounds"), Variant("5,000 rounds", times=Fraction(10, 3))),
    ),
    "3": Table(
        "With and without clipping of the effective learning rate",
        _RESNET_AND_CCT,
        ("unbiased",),
        ("0.1", "0.2"),
        (Variant("clipped"), Variant("not clipped", ("local.clip=.inf",))),
    ),
    "4": Table(
        "Which design draws",
        _RESNET_AND_CCT,
        ("unbiased", "collective"),
        ("0.1", "0.2"),
        (
            Variant("conditional Poisson"),
            Variant("Brewer", ("design=brewer",)),
            Variant("minimum support", ("design=minimum_support",)),
        ),
    ),
    "5": Table(
        "Frobenius or Schatten norm", ("cifar10_resnet18", *_RESNET_AND_CCT), ("unbiased", "collective", "schatten")
    ),
    "longer": Table(
        "Longer training on CIFAR-10 (ours, not in the paper)",
        ("cifar10_resnet18",),
        (*_BEST, "dense"),
        variants=(  # the second are the published 1,000 rounds at the medium scale
            Variant("its own rounds"),
            Variant("2.5 times as many", ("alignment=false",), Fraction(5, 2)),
        ),
    ),
    "figure1": Table(
        "Accuracy, and how even the draws are (ANME)",
        ("cifar100_resnet18",),
        ("top_n", "prism", "prism_wallenius", "prism_wallenius_clip", "unbiased", "collective"),
        panels=(("rounds", "test_accuracy"), ("rounds", "anme")),
    ),
    "figure2": Table(
        "Convergence: the server's model on the training set",
        ("cifar10_resnet18",),
        ("unbiased", "collective"),
        variants=(Variant("10,000 rounds", ("evaluate_training=true",), Fraction(10)),),
        panels=(("rounds", "train_set_loss"), ("rounds", "train_set_accuracy")),
    ),
    "figure3": Table(
        "More and less heterogeneous clients",
        ("cifar10_resnet18",),
        _BEST,
        variants=tuple(Variant(f"α = {alpha}", (f"data.partition.alpha={alpha}",)) for alpha in (1, 10)),
        panels=(("rounds", "test_accuracy"),),
    ),
    "figure4": Table(
        "How far a round's update goes FedAvg's way (cosine)",
        ("cifar10_resnet18",),
        ("top_n", "prism", "prism_wallenius_clip", "unbiased", "collective"),
        variants=(Variant("measured against FedAvg", ("alignment=true",)),),
        panels=(("rounds", "alignment"),),
    ),
}


def _read_published() -> dict[tuple[str, str, str], dict[str, str]]:
    """Return the published mean ± standard deviation in % by strategy, of each experiment, keep ratio and variant."""
    with Path(__file__).with_name("published.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {(row.pop("experiment"), row.pop("keep ratio"), row.pop("variant")): row for row in rows}


PUBLISHED = _read_published()


def published_of(setting: Setting, strategy: str) -> str | None:
    """Return the published mean ± standard deviation of a cell, in %, or None if unknown."""
    is_plain = setting.variant == Variant(setting.variant.label)
    variant = "" if is_plain else setting.variant.label
    return PUBLISHED.get((setting.experiment, setting.keep_ratio, variant), {}).get(strategy) or None
