"""What all studies share: configurations, missing runs, kept curves, and the summary."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console
from torch import nn

from sharding import UserError
from sharding.errors import join_first
from studies.curves import COLUMNS, evaluations, read_curves, write_curves
from train.cli.progress import sweep_missing
from train.cli.sweep import default_jobs
from train.config.schema import Config, load_config
from train.experiment.evaluation import evaluate
from train.experiment.experiment import Experiment
from train.report.frame import round_frame
from train.rundir.directory import check_directory
from train.rundir.file_names import METRICS_FILE
from train.utils.errors import RunError
from train.utils.jsonl import read_lines

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


def configs_of(path: Path, schemes: Mapping[str, Sequence[str]], seeds: Sequence[int], into: Path) -> dict[str, Config]:
    """Return the configuration of every seed of every scheme, as ``scheme-seed``, each with its own folder."""
    return {
        f"{scheme}-{seed}": load_config(path, [*words, f"seed={seed}", f"output={into}/runs/{folder(scheme)}-{seed}"])
        for seed in seeds
        for scheme, words in schemes.items()
    }


def folder(scheme: str) -> str:
    """Return a folder's name for a scheme, without remarks in brackets, commas and blanks."""
    return scheme.partition(" (")[0].replace(", ", "-").replace(" ", "_")


def run_all(configs: Mapping[str, Config], jobs: int | None = None, diverging: bool = False) -> pd.DataFrame:
    """Run what is missing, `jobs` runs at a time (default one per core), and return the curves of all runs.

    With `diverging`, a training that diverges is not a failure; its curve ends where it diverged.

    Raises:
        RunError: a run failed; the others are done.
        UserError: the folder of a run, finished or not, holds one of another configuration.
    """
    for config in configs.values():
        check_directory(config, resume=True)
    failures = sweep_missing(configs, jobs or default_jobs(), Console())
    if lost := {path: each.reason for path, each in failures.items() if not (diverging and each.is_diverged)}:
        raise RunError("; ".join(f"{path}: {reason}" for path, reason in lost.items()))
    return evaluations(rounds_of(configs))


class Rounds(Protocol):
    """Rounds that a study trains in its own way."""

    experiment: Experiment

    @property
    def model(self) -> nn.Module:
        """The server's model."""

    def train_round(self, t: int) -> dict[str, Any]:
        """Train round `t` and return its metrics."""


def run_one_by_one(configs: Mapping[str, Config], start: Callable[[Config], Rounds]) -> pd.DataFrame:
    """Run what is missing in a study's own way, and return the rounds of all runs.

    An interrupted run starts again.
    """
    for config in configs.values():
        if len(read_lines(config.directory / METRICS_FILE)) < config.rounds:
            write_rounds(config, start(config))
    return rounds_of(configs)


def write_rounds(config: Config, rounds: Rounds) -> None:
    """Train all rounds of a run, and write their metrics, one line each."""
    dataset = rounds.experiment.dataset
    config.directory.mkdir(parents=True, exist_ok=True)
    with (config.directory / METRICS_FILE).open("w", encoding="utf-8") as file:
        for t in range(config.rounds):
            line = rounds.train_round(t)
            if config.evaluates(t):
                line["test_accuracy"], line["test_loss"] = evaluate(rounds.model, dataset, dataset.test)
                print(f"{config.directory.name}, round {t + 1}: {line['test_accuracy']:.1%}", flush=True)
            file.write(json.dumps(line) + "\n")
            file.flush()


def rounds_of(configs: Mapping[str, Config]) -> pd.DataFrame:
    """Return the rounds of these runs, as `train.report.frame.round_frame` does."""
    return round_frame({name: read_lines(config.directory / METRICS_FILE) for name, config in configs.items()})


def curves_of(
    configs: Mapping[str, Config],
    arguments: Arguments,
    name: str = "curves.csv",
    diverging: bool = False,
    columns: Sequence[str] = COLUMNS,
    run: Callable[..., pd.DataFrame] | None = None,
) -> pd.DataFrame:
    """Return the curve of every run, after running those that have none in the file of curves.

    The file then holds all of them, so that a study's table can be made again without the runs. A run with overrides is
    stored under a name that contains them.

    Args:
        configs: the runs, by name.
        arguments: the study's.
        name: of the file.
        diverging: whether a training that diverges counts as a run, up to where it diverged.
        columns: to keep of a curve.
        run: runs them, instead of `run_all`.

    Raises:
        RunError: a run failed; the others are done.
        UserError: nothing is to be run, and a curve is missing.
    """
    if missing := to_run(configs, arguments, name):
        if arguments.only == ():
            raise UserError(
                f"{arguments.into / name} has no curve of {join_first([*missing])}; run the study without --only"
            )
        measured = (run or run_all)(missing, arguments.jobs, diverging)[["run", *columns]]
        measured = measured.assign(run=[_named(each, arguments) for each in measured.run])
        earlier = read_curves(arguments.into / name, columns)
        write_curves(arguments.into / name, pd.concat([earlier, measured]) if len(earlier) else measured)
    curves = kept_curves(arguments, name, columns)
    return curves[curves.run.isin(configs)]


def to_run(configs: Mapping[str, Config], arguments: Arguments, name: str = "curves.csv") -> dict[str, Config]:
    """Return the runs without a curve in this file."""
    finished = {*read_curves(arguments.into / name).run}
    return {run: config for run, config in configs.items() if _named(run, arguments) not in finished}


def kept_curves(arguments: Arguments, name: str = "curves.csv", columns: Sequence[str] = COLUMNS) -> pd.DataFrame:
    """Return the curves of runs with these overrides from a file of curves, by names without the overrides."""
    suffix, curves = _named("", arguments), read_curves(arguments.into / name, columns)
    curves = curves[curves.run.str.endswith(suffix)].reset_index(drop=True)
    return curves.assign(run=curves.run.str.removesuffix(suffix))


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
