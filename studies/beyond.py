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
from math import isnan, nan
from statistics import fmean, stdev
from typing import NamedTuple

from sharding.errors import UserError
from studies.curves import Curve, Lines, Scored, by_seed
from studies.runner import CONFIGS, Arguments, curves_of, folder, kept_curves, write_summary
from studies.width import run as run_width
from train.config.schema import Config, load_config
from train.report.text import NOTHING, markdown_table, mean_and_spread
from train.runtime.jsonl import read_lines

SEEDS = (0, 1, 2)


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
        windows: the methods of `WINDOWS` to run.
    """

    config: str
    title: str
    words: Sequence[str]
    equal: Mapping[str, Sequence[str]]
    windows: Sequence[str] = ()


EXPERIMENTS = {
    "beyond": Experiment(
        "beyond",
        "CIFAR-10 (a lossy re-encoding), medium scale, r = 0.1",
        ("keep_ratio=0.1",),
        {
            "dense": ("rounds=50", "local.lr=0.03"),
            "narrow": ("model.width=10", "model.groups=5", "rounds=500"),
        },
        ("width, rolling",),
    ),
    "beyond_uneven": Experiment(
        "beyond",
        "CIFAR-10 (a lossy re-encoding), medium scale, r = 0.2 of 60 % of the clients and 0.4 of 40 %",
        ("keep_ratio={0.2: 0.6, 0.4: 0.4}", "rounds=200"),
        {
            "dense": ("rounds=67", "local.lr=0.03"),
            "narrow": ("model.width=14", "model.groups=7", "rounds=347"),
            "width, nested": ("rounds=245",),
        },
    ),
    "beyond_shakespeare": Experiment(
        "beyond_shakespeare",
        "Shakespeare, a transformer, r = 0.1",
        ("keep_ratio=0.1",),
        {"dense": ("rounds=54",), "narrow": ("model.width=104", "rounds=300")},
    ),
}
BASELINE = "collective"
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
}
# Sub-models by width, studies/width.py; the second word is the kind of windows.
WINDOWS: dict[str, Sequence[str]] = {"width, rolling": []}
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
    methods = [*METHODS, *its.windows] if arguments.only is None else arguments.only
    if strange := set(methods) - {*METHODS, *its.windows}:
        raise UserError(f"--only: {', '.join(sorted(strange))} is not a method of {arguments.study}; see METHODS")
    train(its, arguments, methods)
    curves = dict(sorted(kept_curves(arguments.into / "curves.csv", arguments.overrides).items()))
    text = [f"# Beyond the published algorithm: {its.title}", "", table(curves), *differences(curves)]
    write_summary(arguments, text)


def train(its: Experiment, arguments: Arguments, methods: Sequence[str]) -> None:
    """Run these methods unless they have curves."""
    kept, overrides = arguments.into / "curves.csv", arguments.overrides
    pairs = {f"{method}-{seed}": (method, seed) for seed in arguments.seeds or SEEDS for method in methods}
    configs = {
        name: config_of(its, method, seed, [*overrides, f"output={arguments.into}/runs/{folder(method)}-{seed}"])
        for name, (method, seed) in pairs.items()
    }
    published = {name: config for name, config in configs.items() if pairs[name][0] in METHODS}
    curves_of(published, kept, overrides, arguments.jobs)
    windows = {name: config for name, config in configs.items() if pairs[name][0] in WINDOWS}
    curves_of(windows, kept, overrides, run=run_windows)


def run_windows(configs: Mapping[str, Config], *_: object) -> Mapping[str, Lines]:
    """Run sub-models by width, named as in `WINDOWS`, and return their metrics."""
    found = {}
    for name, config in configs.items():
        path = config.directory / "metrics.jsonl"
        if len(read_lines(path)) < config.rounds:
            run_width(config, config.directory, name.rpartition("-")[0].split(", ")[1])
        found[name] = read_lines(path)
    return found


def config_of(its: Experiment, method: str, seed: int, overrides: Sequence[str]) -> Config:
    """Return the configuration of a method."""
    own = METHODS[method] if method in METHODS else [*METHODS[BASELINE], *WINDOWS[method]]
    equal = next((words for name, words in its.equal.items() if method.startswith(name)), ())
    words = [*its.words, *own, *equal, *overrides, f"seed={seed}"]
    return load_config(CONFIGS / f"{its.config}.yaml", words)


def table(curves: Mapping[str, Curve]) -> str:
    """Return a table, one row per method: accuracy on the way and at the end, paired difference to `collective`."""
    parts = (0.25, 0.5, 0.75)
    runs, rows = by_method(curves), []
    for method, seeds in runs.items():
        if seeds:
            last = next(iter(seeds.values()))[-1]
            courses = [[accuracy_near(its, part) for its in seeds.values()] for part in (*parts, 1.0)]
            best = [100 * max(at.test_accuracy for at in its) for its in seeds.values()]
            moved = f"{(last.bytes_up + last.bytes_down) / 1e9:.1f}"
            shown = [NOTHING if any(map(isnan, values)) else mean_and_spread(values) for values in (*courses, best)]
            which = ", ".join(map(str, seeds))
            rows.append([method, last.rounds, moved, which, *shown, difference(seeds, runs[BASELINE])])
    ways = (f"{100 * part:.0f} % of it" for part in parts)
    head = ("method", "rounds", "GB", "seeds", *ways, "end", "best", f"end minus {BASELINE}")
    return markdown_table(head, rows)


def differences(curves: Mapping[str, Curve]) -> list[str]:
    """Return a table of the last accuracies' differences, a row for each of `PAIRS` that has seeds in common."""
    runs = by_method(curves)
    rows = [
        [mine, theirs, difference(ours, others)]
        for mine, theirs in PAIRS
        if set(ours := runs.get(mine, {})) & set(others := runs.get(theirs, {}))
    ]
    return ["", markdown_table(("method", "minus", "difference in points"), rows, 2)] if rows else []


def by_method(curves: Mapping[str, Curve]) -> dict[str, dict[int, Curve]]:
    """Return the curves named ``method-seed`` by method and seed."""
    return {method: {} for method in (*METHODS, *WINDOWS)} | by_seed(curves)


def accuracy_near(its: Sequence[Scored], part: float) -> float:
    """Return the mean accuracy, in %, of the evaluations in the fifth of a run that ends at this part of it.

    Part 1 gives the last evaluation only. Without an evaluation in that fifth the result is NaN.
    """
    end, whole = part * its[-1].rounds, its[-1].rounds
    seen = [100 * at.test_accuracy for at in its if end - whole / 5 <= at.rounds <= end]
    return 100 * its[-1].test_accuracy if part == 1 else fmean(seen) if seen else nan


def difference(mine: Mapping[int, Sequence[Scored]], theirs: Mapping[int, Sequence[Scored]]) -> str:
    """Return the mean difference of the last accuracies, seed by seed, ± its standard error."""
    seeds = sorted(set(mine) & set(theirs))
    if not seeds or mine is theirs:
        return "–"
    gaps = [100 * (mine[seed][-1].test_accuracy - theirs[seed][-1].test_accuracy) for seed in seeds]
    error = f" ± {stdev(gaps) / len(gaps) ** 0.5:.1f}" if len(gaps) > 1 else " (one seed)"
    return f"{fmean(gaps):+.1f}{error}"
