"""How every study runs: configurations, what is missing of them, the curves that are kept, and the summary."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.curves import Evaluation, Lines, Row, curve, read_curves, write_curves
from train.compare import compare, default_jobs
from train.config.schema import Config, load_config
from train.report import History
from train.rundir.directory import is_measured
from train.runtime.errors import RunError

CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class Asked:
    """What the command line asks for.

    Attributes:
        study: its name.
        into: the folder to write to.
        overrides: of every run.
        quick: a few rounds of a few runs, to see that it works.
        seeds: in place of the study's own.
        only: what to run of the study; the rest of the table is of what there is.
        jobs: runs at a time; one a core if not given.
    """

    study: str
    into: Path
    overrides: tuple[str, ...] = ()
    quick: bool = False
    seeds: tuple[int, ...] | None = None
    only: tuple[str, ...] | None = None
    jobs: int | None = None

    @property
    def command(self) -> str:
        """What makes its summary again."""
        return shlex.join(["python", "-m", "studies", self.study, *["--quick"][: self.quick], *self.overrides])


def cells(
    path: Path, schemes: Mapping[str, Sequence[str]], seeds: Sequence[int], into: Path, overrides: Sequence[str]
) -> dict[str, Config]:
    """Return the configuration of every seed of every scheme, each with a folder of its own, as ``scheme-seed``."""
    return {
        f"{scheme}-{seed}": load_config(
            path, [*overrides, *own, f"seed={seed}", f"output={into}/runs/{folder(scheme)}-{seed}"]
        )
        for seed in seeds
        for scheme, own in schemes.items()
    }


def folder(scheme: str) -> str:
    """Return a scheme's name as that of a folder: no remark in brackets, no comma, no blank."""
    return scheme.partition(" (")[0].replace(", ", "-").replace(" ", "_")


def run_all(configs: Mapping[str, Config], jobs: int | None = None, diverging: bool = False) -> dict[str, Lines]:
    """Run what has not been run yet, so many at a time (one a core), and return every run's metrics.

    With `diverging`, trainings that diverge are no failures; they have the rounds up to where they did.

    Raises:
        RunError: a run failed; the others are done.
    """
    names, cells = list(configs), list(configs.values())
    wanted = [cell for cell in cells if not is_measured(cell)]

    def show(place: int, metrics: Mapping[str, Any]) -> None:
        if metrics["round"] == wanted[place].rounds - 1 or "stopped" in metrics:
            print(f"{names[cells.index(wanted[place])]}: {metrics['test_accuracy']:.4f}", flush=True)

    failures = compare(wanted, show, jobs or default_jobs(), resume=True)
    lost = {where: failure.why for where, failure in failures.items() if not (diverging and failure.diverged)}
    if lost:
        raise RunError("; ".join(f"{where}: {why}" for where, why in lost.items()))
    return {name: History.read(config.directory).lines for name, config in configs.items()}


def curves_of(
    configs: Mapping[str, Config],
    kept: Path,
    overrides: Sequence[str] = (),
    jobs: int | None = None,
    diverging: bool = False,
    measure: Callable[[Lines], list[Row]] = curve,
    kind: type[Row] = Evaluation,
    run: Callable[..., Mapping[str, Lines]] | None = None,
) -> dict[str, list[Row]]:
    """Return the curve of every run; those that have none in this file are run, as far as their folders have them not.

    The file has all of them then, so that a study's table is made again without its runs; what was run with the user's
    own overrides stands there under names that say so.

    Args:
        configs: the runs, by name.
        kept: the file of curves.
        overrides: the user's own.
        jobs: runs at a time.
        diverging: whether trainings that diverge count as runs, up to where they did.
        measure: what is kept of a run's metrics.
        kind: of the rows that `measure` returns.
        run: what runs them, in place of `run_all`.

    Raises:
        RunError: a run failed; the others are done.
    """
    missing = to_run(configs, kept, overrides, kind)
    lines = (run or run_all)(missing, jobs, diverging) if missing else {}
    known = read_curves(kept, kind) | {_named(name, overrides): measure(its) for name, its in lines.items()}
    write_curves(kept, known, kind)
    return {name: known[_named(name, overrides)] for name in configs}


def to_run(
    configs: Mapping[str, Config], kept: Path, overrides: Sequence[str], kind: type[Row] = Evaluation
) -> dict[str, Config]:
    """Return the runs that have no curve in this file."""
    known = read_curves(kept, kind)
    return {name: config for name, config in configs.items() if _named(name, overrides) not in known}


def _named(name: str, overrides: Sequence[str]) -> str:
    return " ".join([name, *overrides])


def write_summary(asked: Asked, lines: Sequence[str], picture: str | None = None) -> None:
    """Write `summary.md`, and print it: these lines, the command that made them, and the picture of that title."""
    text = [*lines, "", f"Made by `{asked.command}`.", ""]
    text += [f"![{picture}]({asked.study}.png)", ""] if picture else []
    (asked.into / "summary.md").write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))
