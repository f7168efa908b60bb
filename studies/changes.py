"""Runs of the program with a change that is no option of it, for a study; they resume as any run does."""

import json
from collections.abc import Callable, Mapping
from functools import partial

import pandas as pd
from rich.console import Console

from studies.curves import evaluations
from studies.runner import rounds_of
from train.callbacks import Callback, EachRound, Plans
from train.cli.progress import RoundProgress
from train.config.schema import Config
from train.experiment.assembly import assemble
from train.experiment.evaluation import evaluate
from train.experiment.experiment import Experiment
from train.experiment.metrics import RoundMetrics
from train.run import run
from train.utils.jsonl import complete_lines, valid_objects

MEASURES_FILE = "measures.jsonl"  # in a run's directory: what is measured in each evaluated round

Measures = Mapping[str, Callable[[], float]]
Change = Callable[[Experiment], Measures]  # changes an experiment in place; returns what to measure of it, by name


class Measured(Callback):
    """Builds a changed experiment, and writes its measures and the last model's accuracy in each evaluated round."""

    def __init__(self, config: Config, change: Change) -> None:
        self._config, self._change = config, change
        self._measures: Measures = {}

    def build(self, config: Config) -> Experiment:
        """Build the experiment and change it."""
        experiment = assemble(config)
        self._measures = {"last_accuracy": partial(last_accuracy, experiment)} | dict(self._change(experiment))
        return experiment

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> None:
        """Write a line. A resumed run may write a round's line again."""
        if self._config.evaluates(metrics.round):
            line = {"rounds": metrics.round + 1} | {name: measure() for name, measure in self._measures.items()}
            with (self._config.directory / MEASURES_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def last_accuracy(experiment: Experiment) -> float:
    """Return the test accuracy of the last model, not of the average."""
    return evaluate(experiment.model, experiment.dataset, experiment.dataset.test)[0]


def unchanged(experiment: Experiment) -> Measures:
    """Change nothing."""
    return {}


def run_all(change: Change, configs: Mapping[str, Config], *_: object) -> pd.DataFrame:
    """Run what is missing with a change, one run at a time; return the curves of all runs, with what was measured.

    Raises:
        RunError: a run failed.
    """
    for name, config in configs.items():
        measured = Measured(config, change)
        with RoundProgress(Console(), [config], [name]) as progress:
            run(config, [EachRound(partial(progress.show, 0)), measured], resume=True, build=measured.build)
    lines = [
        {"run": name, **line}
        for name, config in configs.items()
        for line in valid_objects(complete_lines(config.directory / MEASURES_FILE))
    ]
    measures = pd.DataFrame(lines).drop_duplicates(["run", "rounds"], keep="last")
    return evaluations(rounds_of(configs)).merge(measures, on=["run", "rounds"], how="left")
