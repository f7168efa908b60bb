"""What could beat the published algorithm at the same bytes and the same work of a client: three experiments.

CIFAR-10 at the medium scale of the paper's column (configs/beyond.yaml), r = 0.1; the same with the paper's uneven
clients, r of 0.2 and 0.4, for half of the rounds; and a transformer on Shakespeare at its published width
(configs/beyond_shakespeare.yaml), r = 0.1, for a fifth of the published rounds. Every method moves the bytes of
`collective` and has its clients do its multiply-adds, or less; those that send more a round have fewer rounds. Numbers
of a method were chosen on other data or another seed than those reported, and are in `METHODS`. Runs in WHERE/runs are
not run again, and one that was cut off goes on. The table is of all curves in WHERE/curves.csv, where those of new runs
replace their own.

    python benchmarks/beyond.py results/beyond [--on cifar10] [--only METHOD …] [--seeds 0 1 2] [KEY=VALUE …]
"""

import sys
from collections.abc import Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from arguments import parser_of
from studies import Curve, Lines, curve, read_curves, run_all, write_curves
from width import run as run_width

from train.config import Config, load_config
from train.lines import read_lines
from train.report.targets import mean_and_spread

CONFIGS = Path(__file__).parents[1] / "configs"


class Experiment(NamedTuple):
    """What methods are compared on.

    `dense` has fewer rounds of the whole model; `narrow` is the model made as narrow as the weakest client's shard is
    small, and has more. Their rates on CIFAR-10 are the best of four, seed 1000: results/beyond/learning_rate.csv. All
    others have the published 0.1.

    Attributes:
        config: its file in configs/.
        title: of its table.
        words: in which it differs from that.
        equal: what makes a method move the bytes of the others within 1 %, by how its name begins.
        windows: the methods of `WINDOWS` that it has.
    """

    config: str
    title: str
    words: Sequence[str]
    equal: Mapping[str, Sequence[str]]
    windows: Sequence[str] = ()


EXPERIMENTS = {
    "cifar10": Experiment(
        "beyond",
        "CIFAR-10 (a lossy re-encoding), medium scale, r = 0.1",
        ("keep_ratio=0.1",),
        {
            "dense": ("rounds=50", "local.lr=0.03"),
            "narrow": ("model.width=10", "model.groups=5", "rounds=500"),
        },
        ("width, rolling",),
    ),
    "uneven": Experiment(
        "beyond",
        "CIFAR-10 (a lossy re-encoding), medium scale, r = 0.2 of 60 % of the clients and 0.4 of 40 %",
        ("keep_ratio={0.2: 0.6, 0.4: 0.4}", "rounds=200"),
        {
            "dense": ("rounds=67", "local.lr=0.03"),
            "narrow": ("model.width=14", "model.groups=7", "rounds=347"),
            "width, nested": ("rounds=245",),
            "width, strongest": ("rounds=426",),
        },
        ("width, nested", "width, nested, look_ahead", "width, strongest"),
    ),
    "shakespeare": Experiment(
        "beyond_shakespeare",
        "Shakespeare, a transformer, r = 0.1",
        ("keep_ratio=0.1",),
        {"dense": ("rounds=54",), "narrow": ("model.width=104", "rounds=300")},
    ),
}
BASELINE = "collective"
# The rate is the better of two, seed 1000: results/beyond/hundred_rounds.csv.
SCALED = ("local.optimizer=scaled_sgd", "local.lr=0.05")
# β and η_g were tried on the digits of the quickstart, seeds 0 and 1: results/beyond/digits.csv.
LOOK_AHEAD = ("server_optimizer=look_ahead", "server_momentum=0.8", "server_lr=0.4")
AVERAGE = ("result=average",)
METHODS: dict[str, Sequence[str]] = {
    "collective": ["strategy=collective"],
    "top_n": ["strategy=top_n"],
    "prism_wallenius_clip": ["strategy=prism_wallenius_clip"],
    "dense, equal bytes": ["strategy=dense", "evaluate_every=5"],
    "narrow, equal bytes": ["strategy=dense"],
    "collective, look_ahead": ["strategy=collective", *LOOK_AHEAD],
    "top_n, look_ahead": ["strategy=top_n", *LOOK_AHEAD],
    "dense, equal bytes, look_ahead": ["strategy=dense", "evaluate_every=5", *LOOK_AHEAD],
    "narrow, equal bytes, look_ahead": ["strategy=dense", *LOOK_AHEAD],
    "collective, low_rank": ["strategy=collective", "start=low_rank"],
    "collective, low_rank, look_ahead": ["strategy=collective", "start=low_rank", *LOOK_AHEAD],
    "collective, low_rank, scaled": ["strategy=collective", "start=low_rank", *SCALED],
    "collective, low_rank, scaled, look_ahead": ["strategy=collective", "start=low_rank", *SCALED, *LOOK_AHEAD],
    "collective, low_rank, scaled, look_ahead, average": [
        "strategy=collective",
        "start=low_rank",
        *SCALED,
        *LOOK_AHEAD,
        *AVERAGE,
    ],
    "narrow, equal bytes, look_ahead, average": ["strategy=dense", *LOOK_AHEAD, *AVERAGE],
    "top_n, low_rank, scaled, look_ahead": ["strategy=top_n", "start=low_rank", *SCALED, *LOOK_AHEAD],
    "collective, double steps": ["strategy=collective", "server_lr=2"],  # as far as look_ahead goes in the long run
    "collective, int8": ["strategy=collective", "wire=int8"],
}
# Sub-models by width, benchmarks/width.py: the second word is the kind of windows.
WINDOWS: dict[str, Sequence[str]] = {
    "width, rolling": [],
    "width, nested": [],
    "width, nested, look_ahead": LOOK_AHEAD,
    "width, strongest": [],
}
# What is compared with something else than the baseline.
PAIRS = (
    ("top_n, look_ahead", "collective, look_ahead"),
    ("dense, equal bytes, look_ahead", "dense, equal bytes"),
    ("narrow, equal bytes, look_ahead", "narrow, equal bytes"),
    ("narrow, equal bytes", "collective, look_ahead"),
    ("collective, low_rank, look_ahead", "collective, look_ahead"),
    ("collective, low_rank, scaled, look_ahead", "collective, low_rank, look_ahead"),
    ("collective, low_rank, scaled, look_ahead", "top_n, low_rank, scaled, look_ahead"),
    ("collective, low_rank, scaled, look_ahead", "narrow, equal bytes"),
    ("collective, low_rank, scaled, look_ahead", "narrow, equal bytes, look_ahead"),
    ("collective, low_rank, scaled, look_ahead, average", "collective, low_rank, scaled, look_ahead"),
    ("collective, low_rank, scaled, look_ahead, average", "narrow, equal bytes, look_ahead, average"),
    ("narrow, equal bytes, look_ahead, average", "narrow, equal bytes, look_ahead"),
    ("collective, look_ahead", "dense, equal bytes, look_ahead"),
    ("collective, look_ahead", "narrow, equal bytes, look_ahead"),
    ("width, nested, look_ahead", "width, nested"),
    ("collective, low_rank, scaled, look_ahead", "width, nested, look_ahead"),
)


def main(words: Sequence[str]) -> None:
    """Run what is missing, and write a table of what there is."""
    parser = parser_of(__doc__)
    parser.add_argument("--on", choices=EXPERIMENTS, default="cifar10", help="the experiment")
    parser.add_argument("--only", nargs="*", choices=[*METHODS, *WINDOWS], metavar="METHOD")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    args = parser.parse_intermixed_args(words)
    its = EXPERIMENTS[args.on]
    methods = [*METHODS, *its.windows] if args.only is None else args.only
    if strange := set(methods) - {*METHODS, *its.windows}:
        parser.error(f"{', '.join(sorted(strange))}: not of --on {args.on}; leave it out of --only")
    train(args.on, args.into, methods, args.seeds, args.overrides)
    kept = args.into / "curves.csv"
    curves = dict(sorted((read_curves(kept) | finished(args.on, args.into, args.overrides)).items()))
    write_curves(kept, curves)
    text = [
        f"# Beyond the published algorithm: {its.title}",
        "",
        *table(curves),
        "",
        *differences(curves),
        f"Made by `python benchmarks/beyond.py results/{args.into.name} --on {args.on}`, a few methods at a time.",
        "",
    ]
    (args.into / "summary.md").write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))


def train(on: str, into: Path, methods: Sequence[str], seeds: Sequence[int], overrides: Sequence[str]) -> None:
    """Run these methods with these seeds, as far as it has not been done."""
    pairs = [(method, seed) for seed in seeds for method in methods]
    places = {(method, seed): into / "runs" / f"{folder(method)}-{seed}" for method, seed in pairs}
    run_all(
        {
            f"{method}-{seed}": config_of(on, method, seed, [*overrides, f"output={places[method, seed]}"])
            for method, seed in pairs
            if method in METHODS
        }
    )
    for method, seed in pairs:
        if method in WINDOWS:
            config, place = config_of(on, method, seed, overrides), places[method, seed]
            if len(lines_of(place)) < config.rounds:
                run_width(config, place, method.split(", ")[1])


def config_of(on: str, method: str, seed: int, overrides: Sequence[str]) -> Config:
    """Return the configuration of a method."""
    its = EXPERIMENTS[on]
    own = METHODS[method] if method in METHODS else [*METHODS[BASELINE], *WINDOWS[method]]
    equal = next((words for name, words in its.equal.items() if method.startswith(name)), ())
    words = [*its.words, *own, *equal, *overrides, f"seed={seed}"]
    return load_config(CONFIGS / f"{its.config}.yaml", words)


def folder(method: str) -> str:
    """Return the name of a method's folder."""
    return method.replace(", ", "-").replace(" ", "_")


def lines_of(place: Path) -> Lines:
    """Return the metrics of a run, none where there is none."""
    return read_lines(place / "metrics.jsonl")


def finished(on: str, into: Path, overrides: Sequence[str]) -> dict[str, Curve]:
    """Return the curves of all whole runs that there are, as ``method-seed``; another process may be at others."""
    found = {}
    for method in (*METHODS, *EXPERIMENTS[on].windows):
        rounds = config_of(on, method, 0, overrides).rounds
        for place in sorted((into / "runs").glob(f"{folder(method)}-[0-9]*")):
            lines = lines_of(place)
            if len(lines) == rounds:
                found[f"{method}-{place.name.rpartition('-')[2]}"] = curve(lines)
    return found


def table(curves: Mapping[str, Curve]) -> list[str]:
    """Return a row a method: accuracy on the way and at the end, and the paired difference to `collective`."""
    parts = (0.25, 0.5, 0.75)
    head = ("method", "rounds", "GB", "seeds", *(f"{100 * part:.0f} % of it" for part in parts), "end", "best")
    lines = [f"| {' | '.join(head)} | end, less {BASELINE}'s |", "|---|" + "---:|" * len(head)]
    runs = by_method(curves)
    for method, seeds in runs.items():
        if seeds:
            last = next(iter(seeds.values()))[-1]
            courses = [[accuracy_near(its, part) for its in seeds.values()] for part in (*parts, 1.0)]
            best = [100 * max(at.test_accuracy for at in its) for its in seeds.values()]
            moved = (last.bytes_up + last.bytes_down) / 1e9
            cells = [
                method,
                str(last.rounds),
                f"{moved:.1f}",
                ", ".join(map(str, seeds)),
                *map(shown, [*courses, best]),
            ]
            lines.append(f"| {' | '.join(cells)} | {difference(seeds, runs[BASELINE])} |")
    return lines


def differences(curves: Mapping[str, Curve]) -> list[str]:
    """Return a sentence for each of `PAIRS` that has seeds in common, and an empty line after it."""
    runs = by_method(curves)
    return [
        line
        for mine, theirs in PAIRS
        if set(runs[mine]) & set(runs[theirs])
        for line in (f"End of `{mine}`, less that of `{theirs}`: {difference(runs[mine], runs[theirs])}.", "")
    ]


def by_method(curves: Mapping[str, Curve]) -> dict[str, dict[int, Curve]]:
    """Return the curves of ``method-seed`` by method and seed."""
    runs: dict[str, dict[int, Curve]] = {method: {} for method in (*METHODS, *WINDOWS)}
    for name, its in curves.items():
        method, _, seed = name.rpartition("-")
        runs[method][int(seed)] = its
    return runs


def accuracy_near(its: Curve, part: float) -> float:
    """Return the mean accuracy, in %, of the evaluations in the fifth of a run that ends with a part of it.

    Of the whole it is the last one's; where there was none in that fifth, NaN.
    """
    end, whole = part * its[-1].rounds, its[-1].rounds
    seen = [100 * at.test_accuracy for at in its if end - whole / 5 <= at.rounds <= end]
    return 100 * its[-1].test_accuracy if part == 1 else fmean(seen) if seen else nan


def shown(values: Sequence[float]) -> str:
    """Return mean ± standard deviation, a dash where a value is missing."""
    return "–" if any(map(isnan, values)) else mean_and_spread(values)


def difference(mine: Mapping[int, Curve], theirs: Mapping[int, Curve]) -> str:
    """Return the mean difference of the last accuracies seed by seed, ± its standard error."""
    seeds = sorted(set(mine) & set(theirs))
    if not seeds or mine is theirs:
        return "–"
    gaps = [100 * (mine[seed][-1].test_accuracy - theirs[seed][-1].test_accuracy) for seed in seeds]
    error = f" ± {stdev(gaps) / len(gaps) ** 0.5:.1f}" if len(gaps) > 1 else " (one seed)"
    return f"{fmean(gaps):+.1f}{error}"


if __name__ == "__main__":
    main(sys.argv[1:])
