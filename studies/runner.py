"""What all studies share: configurations, missing runs, kept curves, and the summary."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from studies.curves import Evaluation, Lines, Row, curve, read_curves, write_curves
from train.cli.progress import run_missing
from train.compare import default_jobs
from train.config.schema import Config, load_config
from train.report import History
from train.runtime.errors import RunError

CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        study: its name.
        into: the folder to write to.
        overrides: keys set in every run.
        quick: whether to run a few rounds of a few runs, as a check.
        seeds: seeds to use instead of the study's.
        only: methods to run; the table shows all that have curves.
        jobs: runs at a time; default one per core.
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
        """The command that makes the summary again."""
        return shlex.join(["python", "-m", "studies", self.study, *["--quick"][: self.quick], *self.overrides])


def cells(
    path: Path, schemes: Mapping[str, Sequence[str]], seeds: Sequence[int], into: Path, overrides: Sequence[str]
) -> dict[str, Config]:
    """Return the configuration of every seed of every scheme, as ``scheme-seed``, each with its own folder."""
    return {
        f"{scheme}-{seed}": load_config(
            path, [*overrides, *own, f"seed={seed}", f"output={into}/runs/{folder(scheme)}-{seed}"]
        )
        for seed in seeds
        for scheme, own in schemes.items()
    }


def folder(scheme: str) -> str:
    """Return a folder's name for a scheme, without remarks in brackets, commas and blanks."""
    return scheme.partition(" (")[0].replace(", ", "-").replace(" ", "_")


def run_all(configs: Mapping[str, Config], jobs: int | None = None, diverging: bool = False) -> dict[str, Lines]:
    """Run what is missing, `jobs` runs at a time (default one per core), and return every run's metrics.

    With `diverging`, a training that diverges is not a failure; its metrics end where it diverged.

    Raises:
        RunError: a run failed; the others are done.
    """
    failures = run_missing(configs, jobs or default_jobs(), Console())
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
    """Return the curve of every run, after running those that have none in the file of curves.

    The file then holds all of them, so that a study's table can be made again without the runs. A run with overrides is
    stored under a name that contains them.

    Args:
        configs: the runs, by name.
        kept: the file of curves.
        overrides: the user's overrides.
        jobs: runs at a time.
        diverging: whether a training that diverges counts as a run, up to where it diverged.
        measure: extracts the rows to keep from a run's metrics.
        kind: the type of these rows.
        run: runs them, instead of `run_all`.

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
    """Return the runs without a curve in this file."""
    known = read_curves(kept, kind)
    return {name: config for name, config in configs.items() if _named(name, overrides) not in known}


def kept_curves(kept: Path, overrides: Sequence[str], kind: type[Row] = Evaluation) -> dict[str, list[Row]]:
    """Return the curves of runs with these overrides from a file of curves, by names without the overrides."""
    suffix = _named("", overrides)
    curves = read_curves(kept, kind).items()
    return {name.removesuffix(suffix): its for name, its in curves if name.endswith(suffix)}


def _named(name: str, overrides: Sequence[str]) -> str:
    return " ".join([name, *overrides])


def write_summary(arguments: Arguments, lines: Sequence[str], picture: str | None = None) -> None:
    """Write and print `summary.md`: these lines, the command that made them, and the picture with that title."""
    text = [*lines, "", f"Made by `{arguments.command}`.", ""]
    text += [f"![{picture}]({arguments.study}.png)", ""] if picture else []
    (arguments.into / "summary.md").write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))
