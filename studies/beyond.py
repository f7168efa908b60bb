"""Methods that could beat the published algorithm at the same bytes and the same work of a client: three experiments.

- `beyond`: CIFAR-10 at the medium scale of the paper's column (configs/beyond.yaml), r = 0.1.
- `beyond_uneven`: the same with the paper's uneven clients, r of 0.2 and 0.4, for half of the rounds.
- `beyond_shakespeare`: a transformer of the published width (configs/beyond_shakespeare.yaml), r = 0.1, for a fifth of
  the published rounds.

Every method moves the bytes of `collective`, and its clients do as many multiply-adds or fewer. Methods that send more
a round have fewer rounds. The settings in `METHODS` were chosen on other data or another seed than those reported. The
table shows all curves in `curves.csv`; `--only METHOD …` runs these methods, and `--only` none.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import isnan, nan
from statistics import fmean, stdev
from typing import NamedTuple

from sharding.errors import UserError
from studies import width
from studies.curves import Curve, Row, by_seed
from studies.runner import CONFIGS, Arguments, cells, curves_of, kept_curves, run_all, write_summary
from train.report.text import NOTHING, markdown_table, mean_and_spread

SEEDS = (0, 1, 2)
PARTS = (0.25, 0.5, 0.75, 1.0)  # of a run
Runs = Mapping[str, Mapping[int, Curve]]  # by method and seed


class Experiment(NamedTuple):
    """Data and model on which methods are compared.

    `dense` trains the whole model for fewer rounds; `narrow` trains a model as small as the weakest client's shard for
    more rounds. Their rates on CIFAR-10 are the best of four, seed 1000: results/beyond/learning_rate.csv. All others
    use the published 0.1.

    Attributes:
        config: its file in configs/.
        title: the title of its table.
        words: overrides of that file.
        equal: overrides that make a method move the bytes of the others within 1 %, by the beginning of its name.
        windows: whether `ROLLING` can train its model.
    """

    config: str
    title: str
    words: Sequence[str]
    equal: Mapping[str, Sequence[str]]
    windows: bool = False

    @property
    def methods(self) -> list[str]:
        """The methods that can train its model."""
        return [method for method in METHODS if self.windows or method != ROLLING]


EXPERIMENTS = {
    "beyond": Experiment(
        "beyond",
        "CIFAR-10 (a lossy re-encoding), medium scale, r = 0.1",
        ("keep_ratio=0.1",),
        {
            "dense": ("rounds=50", "local.lr=0.03"),
            "narrow": ("model.width=10", "model.groups=5", "rounds=500"),
        },
        windows=True,
    ),
    "beyond_uneven": Experiment(
        "beyond",
        "CIFAR-10 (a lossy re-encoding), medium scale, r = 0.2 of 60 % of the clients and 0.4 of 40 %",
        ("keep_ratio={0.2: 0.6, 0.4: 0.4}", "rounds=200"),
        {
            "dense": ("rounds=67", "local.lr=0.03"),
            "narrow": ("model.width=14", "model.groups=7", "rounds=347"),
        },
    ),
    "beyond_shakespeare": Experiment(
        "beyond_shakespeare",
        "Shakespeare, a transformer, r = 0.1",
        ("keep_ratio=0.1",),
        {"dense": ("rounds=54",), "narrow": ("model.width=104", "rounds=300")},
    ),
}
BASELINE, ROLLING = "collective", "width, rolling"
# β and η_g were tried on the digits of the quickstart, seeds 0 and 1: results/beyond/digits.csv.
NESTEROV = ("server_optimizer=nesterov", "server_momentum=0.8", "server_lr=0.4")
# Methods with `scaled` in results/*/curves.csv stepped by a client's optimizer that was deleted: results/options.
METHODS: dict[str, Sequence[str]] = {
    "collective": ["strategy=collective"],
    "top_n": ["strategy=top_n"],
    "prism_wallenius_clip": ["strategy=prism_wallenius_clip"],
    "dense, equal bytes": ["strategy=dense", "evaluate_every=5"],
    "narrow, equal bytes": ["strategy=dense"],
    "collective, nesterov": ["strategy=collective", *NESTEROV],
    "dense, equal bytes, nesterov": ["strategy=dense", "evaluate_every=5", *NESTEROV],
    "narrow, equal bytes, nesterov": ["strategy=dense", *NESTEROV],
    "collective, low_rank": ["strategy=collective", "init=low_rank"],
    "collective, low_rank, nesterov": ["strategy=collective", "init=low_rank", *NESTEROV],
    "narrow, equal bytes, nesterov, average": ["strategy=dense", *NESTEROV, "result=average"],
    ROLLING: ["strategy=collective"],  # sub-models by width (studies/width.py); the strategy gives their bytes
}
# Methods compared with another method than the baseline.
PAIRS = (
    ("dense, equal bytes, nesterov", "dense, equal bytes"),
    ("narrow, equal bytes, nesterov", "narrow, equal bytes"),
    ("narrow, equal bytes", "collective, nesterov"),
    ("collective, low_rank, nesterov", "collective, nesterov"),
    ("collective, low_rank, scaled, nesterov", "collective, low_rank, nesterov"),
    ("collective, low_rank, scaled, nesterov", "narrow, equal bytes"),
    ("collective, low_rank, scaled, nesterov", "narrow, equal bytes, nesterov"),
    ("collective, low_rank, scaled, nesterov, average", "collective, low_rank, scaled, nesterov"),
    ("collective, low_rank, scaled, nesterov, average", "narrow, equal bytes, nesterov, average"),
    ("narrow, equal bytes, nesterov, average", "narrow, equal bytes, nesterov"),
    ("collective, nesterov", "dense, equal bytes, nesterov"),
    ("collective, nesterov", "narrow, equal bytes, nesterov"),
)


def run(its: Experiment, arguments: Arguments) -> None:
    """Run what is missing, and write a table of all curves."""
    methods = its.methods if arguments.only is None else arguments.only
    if strange := set(methods) - set(its.methods):
        raise UserError(f"--only: {', '.join(sorted(strange))} is not a method of {arguments.study}; see METHODS")
    words = {method: [*words_of(its, method), *arguments.overrides] for method in methods}
    for run, windows in ((run_all, False), (partial(width.run_all, "rolling"), True)):
        some = {method: own for method, own in words.items() if (method == ROLLING) == windows}
        configs = cells(CONFIGS / f"{its.config}.yaml", some, arguments.seeds or SEEDS, arguments.into)
        curves_of(configs, arguments, run=run)
    runs = by_seed(dict(sorted(kept_curves(arguments).items())))
    write_summary(arguments, [f"# Beyond the published algorithm: {its.title}", "", table(runs), *differences(runs)])


def words_of(its: Experiment, method: str) -> list[str]:
    """Return the overrides of a method."""
    equal = next((words for name, words in its.equal.items() if method.startswith(name)), ())
    return [*its.words, *METHODS[method], *equal]


def table(runs: Runs) -> str:
    """Return a table, one row per method: accuracy on the way and at the end, paired difference to `collective`."""
    rows = []
    for method in sorted(runs, key=[*METHODS, *runs].index):
        best = [100 * max(at.test_accuracy for at in its) for its in runs[method].values()]
        rows.append(course(method, runs[method], best, runs.get(BASELINE, {}), ".1f"))
    ways = (f"{100 * part:.0f} % of it" for part in PARTS[:-1])
    head = ("method", "rounds", "GB", "seeds", *ways, "end", "best", f"end minus {BASELINE}")
    return markdown_table(head, rows)


def course(
    name: str, seeds: Mapping[int, Sequence[Row]], more: Sequence[float], first: Mapping[int, Sequence[Row]], form: str
) -> list[object]:
    """Return a row: bytes, seeds, accuracy on the way and at the end, `more` of each seed, difference to the first."""
    end = next(iter(seeds.values()))[-1]
    values = [*([accuracy_near(its, part) for its in seeds.values()] for part in PARTS), more]
    moved, which = f"{(end.bytes_up + end.bytes_down) / 1e9:{form}}", ", ".join(map(str, seeds))
    return [name, end.rounds, moved, which, *map(shown, values), difference(seeds, first)]


def shown(values: Sequence[float]) -> str:
    """Return the mean and deviation, or a dash if a seed has no value."""
    return NOTHING if any(map(isnan, values)) else mean_and_spread(values)


def differences(runs: Runs) -> list[str]:
    """Return a table of the last accuracies' differences, a row for each of `PAIRS` that has seeds in common."""
    rows = [
        [mine, theirs, difference(ours, others)]
        for mine, theirs in PAIRS
        if set(ours := runs.get(mine, {})) & set(others := runs.get(theirs, {}))
    ]
    return ["", markdown_table(("method", "minus", "difference in points"), rows, 2)] if rows else []


def accuracy_near(its: Sequence[Row], part: float) -> float:
    """Return the mean accuracy, in %, of the evaluations in the fifth of a run that ends at this part of it.

    Part 1 gives the last evaluation only. Without an evaluation in that fifth the result is NaN.
    """
    end, whole = part * its[-1].rounds, its[-1].rounds
    seen = [100 * at.test_accuracy for at in its if end - whole / 5 <= at.rounds <= end]
    return 100 * its[-1].test_accuracy if part == 1 else fmean(seen) if seen else nan


def difference(mine: Mapping[int, Sequence[Row]], theirs: Mapping[int, Sequence[Row]]) -> str:
    """Return the mean difference of the last accuracies, seed by seed, ± its standard error."""
    seeds = sorted(set(mine) & set(theirs))
    if not seeds or mine is theirs:
        return "–"
    gaps = [100 * (mine[seed][-1].test_accuracy - theirs[seed][-1].test_accuracy) for seed in seeds]
    error = f" ± {stdev(gaps) / len(gaps) ** 0.5:.1f}" if len(gaps) > 1 else " (one seed)"
    return f"{fmean(gaps):+.1f}{error}"
