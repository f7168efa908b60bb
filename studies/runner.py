"""What all studies share: configurations, missing runs, kept curves, and the summary."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from studies.curves import Evaluation, Lines, Row, read_curves, write_curves
from train.cli.progress import run_missing
from train.compare import default_jobs
from train.config.schema import Config, load_config
from train.report.history import History
from train.runtime.errors import RunError

CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass(frozen=True)
class Arguments:
    """A parsed command line.

    Attributes:
        study: its name.
        into: the folder to write to.
        overrides: keys set in every run.
        seeds: seeds to use instead of the study's.
        only: methods to run; the table shows all that have curves.
        jobs: runs at a time; default one per core.
        command: the command that makes the summary again.
    """

    study: str
    into: Path
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = None
    only: tuple[str, ...] | None = None
    jobs: int | None = None
    command: str = ""


def cells(path: Path, schemes: Mapping[str, Sequence[str]], seeds: Sequence[int], into: Path) -> dict[str, Config]:
    """Return the configuration of every seed of every scheme, as ``scheme-seed``, each with its own folder."""
    return {
        f"{scheme}-{seed}": load_config(path, [*own, f"seed={seed}", f"output={into}/runs/{folder(scheme)}-{seed}"])
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
    arguments: Arguments,
    name: str = "curves.csv",
    diverging: bool = False,
    kind: type[Row] = Evaluation,
    run: Callable[..., Mapping[str, Lines]] | None = None,
) -> dict[str, list[Row]]:
    """Return the curve of every run, after running those that have none in the file of curves.

    The file then holds all of them, so that a study's table can be made again without the runs. A run with overrides is
    stored under a name that contains them.

    Args:
        configs: the runs, by name.
        arguments: the study's.
        name: of the file.
        diverging: whether a training that diverges counts as a run, up to where it diverged.
        kind: the type of the rows to keep of a run.
        run: runs them, instead of `run_all`.

    Raises:
        RunError: a run failed; the others are done.
    """
    missing = to_run(configs, arguments, name, kind)
    lines = (run or run_all)(missing, arguments.jobs, diverging) if missing else {}
    measured = {_named(run, arguments): kind.of_run(its) for run, its in lines.items()}
    known = read_curves(arguments.into / name, kind) | measured
    write_curves(arguments.into / name, known, kind)
    return {run: known[_named(run, arguments)] for run in configs}


def to_run(
    configs: Mapping[str, Config], arguments: Arguments, name: str = "curves.csv", kind: type[Row] = Evaluation
) -> dict[str, Config]:
    """Return the runs without a curve in this file."""
    known = read_curves(arguments.into / name, kind)
    return {run: config for run, config in configs.items() if _named(run, arguments) not in known}


def kept_curves(arguments: Arguments, name: str = "curves.csv", kind: type[Row] = Evaluation) -> dict[str, list[Row]]:
    """Return the curves of runs with these overrides from a file of curves, by names without the overrides."""
    suffix = _named("", arguments)
    curves = read_curves(arguments.into / name, kind).items()
    return {run.removesuffix(suffix): its for run, its in curves if run.endswith(suffix)}


def _named(run: str, arguments: Arguments) -> str:
    return " ".join([run, *arguments.overrides])


def write_summary(arguments: Arguments, lines: Sequence[str], picture: Figure | None = None) -> None:
    """Write and print `summary.md`: these lines, the command that made them, and the picture, which is written too."""
    text = [*lines, "", f"Made by `{arguments.command}`.", ""]
    if picture is not None:
        picture.savefig(arguments.into / f"{arguments.study}.png", dpi=150)
        text += [f"![{picture.get_suptitle()}]({arguments.study}.png)", ""]
    (arguments.into / "summary.md").write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))
