"""The three forms of Frobenius decay without clipping: clients lost, and accuracy.

The quickstart at r = 0.1 and 60 rounds, without clipping (`clip=.inf`).
"""

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple, Self, get_args

from sharding.optim import DecayOf
from studies.curves import Lines
from studies.runner import CONFIGS, Arguments, cells, curves_of, write_summary
from train.report.text import markdown_table, mean_and_spread

STRATEGIES, SEEDS = ("unbiased", "prism_wallenius"), (0, 1, 2, 3)
FIXED = ("recipe=published", "keep_ratio=0.1", "rounds=60", "evaluate_every=20", "clip=.inf")
QUICK = ("rounds=2", "evaluate_every=1")


class Ending(NamedTuple):
    """How a run ended.

    Attributes:
        rounds: finished rounds.
        lost: updates left out, in all rounds.
        trained: clients trained, in all rounds.
        test_accuracy: the last one, in 0…1; 0 without one.
    """

    rounds: int
    lost: int
    trained: int
    test_accuracy: float

    @classmethod
    def of_run(cls, lines: Lines) -> list[Self]:
        """Return how a run ended."""
        lost, trained = (sum(int(line[key]) for line in lines) for key in ("failed", "clients"))
        accuracies = [line["test_accuracy"] for line in lines if "test_accuracy" in line]
        return [cls(len(lines), lost, trained, accuracies[-1] if accuracies else 0.0)]


def run(arguments: Arguments) -> None:
    """Run what is missing and write the table."""
    arguments, seeds = arguments.quickly(QUICK), arguments.seeds_of(SEEDS)
    schemes = {
        f"{form}-{strategy}": (*FIXED, *arguments.overrides, f"local.frobenius_decay_of={form}", f"strategy={strategy}")
        for form, strategy in product(get_args(DecayOf), STRATEGIES)
    }
    configs = cells(CONFIGS / "quickstart.yaml", schemes, seeds, arguments.into)
    found = curves_of(configs, arguments, diverging=True, kind=Ending)
    rounds = next(iter(configs.values())).rounds
    rows = [_row(scheme, rounds, [found[f"{scheme}-{seed}"][0] for seed in seeds]) for scheme in schemes]
    text = [
        f"# Frobenius decay without clipping: the quickstart, r = 0.1, {rounds} rounds",
        "",
        f"{len(seeds)} seeds; accuracy is the mean ± sd of the runs that ended.",
        "",
        markdown_table(
            ("decay of", "strategy", "clients lost of trained", "ended by divergence", "test accuracy, %"), rows, 2
        ),
    ]
    write_summary(arguments, text)


def _row(scheme: str, rounds: int, endings: Sequence[Ending]) -> list[str]:
    form, _, strategy = scheme.partition("-")
    ended = [100 * its.test_accuracy for its in endings if its.rounds == rounds]
    lost, trained = (sum(column) for column in ((i.lost for i in endings), (i.trained for i in endings)))
    early = f"{len(endings) - len(ended)} of {len(endings)}"
    return [form, strategy, f"{lost} of {trained}", early, mean_and_spread(ended)]
