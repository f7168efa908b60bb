"""Show runs while they train: bars on a terminal, else a line from time to time."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from sharding.errors import UserError
from train.config.schema import Config
from train.rundir.file_names import METRICS_FILE
from train.utils.jsonl import read_lines

MAX_BARS = 12  # number of bars on a screen; with more runs, only the running ones have a bar
INTERVAL = 30.0  # seconds between lines without a terminal


@dataclass
class RunProgress:
    """The progress of a run.

    Attributes:
        name: the name of the run.
        rounds: the number of rounds in all.
        done: number of finished rounds.
        seen: number of rounds whose metrics were seen.
        stopped: why the run ended before its last round, if it did.
    """

    name: str
    rounds: int
    done: int = 0
    seen: int = 0
    loss: float | None = None
    accuracy: float | None = None
    megabytes: float = 0.0
    lost: int = 0
    epsilon: float | None = None
    seconds: float = 0.0
    stopped: str | None = None

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Update with a round's metrics."""
        self.done, self.seen = metrics["round"] + 1, self.seen + 1
        self.loss = metrics.get("train_loss", self.loss)
        self.accuracy = metrics.get("test_accuracy", self.accuracy)
        self.megabytes = metrics["bytes_total"] / 1e6
        self.epsilon = metrics.get("epsilon", self.epsilon)
        self.lost += metrics.get("num_failed", 0)
        self.seconds += metrics.get("seconds", 0.0)
        self.stopped = metrics.get("stopped")

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return self.done == self.rounds or self.stopped is not None

    @property
    def seconds_left(self) -> float:
        """Estimated seconds to the end."""
        return self.seconds / self.seen * (self.rounds - self.done) if self.seen else 0.0

    def __str__(self) -> str:
        parts = [] if self.loss is None else [f"loss {self.loss:.3f}"]
        parts += [] if self.accuracy is None else [f"accuracy {100 * self.accuracy:.1f} %"]
        parts += [] if self.epsilon is None else [f"ε {self.epsilon:.3g}"]
        parts += [f"{self.megabytes:,.1f} MB"] + ([f"{self.lost} lost"] if self.lost else [])
        is_timed = self.seconds and not self.finished  # with privacy, times are secrets
        return ", ".join([*parts, *([f"{clock(self.seconds_left)} left"] if is_timed else [])])


class RoundProgress:
    """Shows each run's round, loss, last test accuracy, bytes, lost clients, and the time left.

    Args:
        console: the console to draw on; a quiet one shows nothing.
        configs: the configurations of the runs, in the order by which `show` counts them.
        names: the names of the runs; their strategies if not given.
        now: the time in seconds.
    """

    def __init__(
        self,
        console: Console,
        configs: Sequence[Config],
        names: Sequence[str] = (),
        now: Callable[[], float] = monotonic,
    ) -> None:
        names = names or [config.strategy for config in configs]
        self._runs = [RunProgress(name, config.rounds) for config, name in zip(configs, names, strict=True)]
        self._directories = [config.directory for config in configs]
        self._console, self._now, self._last = console, now, -INTERVAL
        self._heading, self._began = _heading(self._runs, self._directories), False
        self._bars = _Bars(console, self._runs, self._heading) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Remove the bars if no run finished a round: an error message follows."""
        if self._bars is not None:
            self._bars.live.transient = isinstance(error, UserError | ImportError | None) and len(self.idle) == len(
                self._runs
            )
            self._bars.stop()

    @property
    def idle(self) -> list[Path]:
        """The directories of runs of which no round was shown: they had finished before, or failed."""
        return [directory for directory, run in zip(self._directories, self._runs, strict=True) if not run.done]

    def show_stage(self, index: int, stage: str) -> None:
        """Show what a run does before its first round; for several runs, only on their bars.

        Without a terminal, the first line says where the runs write, once most errors have been ruled out.
        """
        if self._bars is not None:
            self._bars.show_stage(index, stage)
            return
        if not self._began:
            self._began = True
            self._print(self._heading)
        if len(self._runs) == 1:
            self._print(f"{self._runs[0].name}: {stage}")

    def show(self, index: int, metrics: Mapping[str, Any]) -> None:
        """Show one round of a run."""
        run = self._runs[index]
        first = not any(other.done for other in self._runs)
        if not run.done:
            for earlier in read_lines(self._directories[index] / METRICS_FILE)[: metrics["round"]]:
                run.update(earlier)
        run.update(metrics)
        if self._bars is not None:
            self._bars.show(index, run)
        elif first or run.finished or self._now() - self._last >= INTERVAL:
            self._last = self._now()
            self._print(f"{run.name}: round {run.done} of {run.rounds}, {run}")
        if run.stopped is not None:
            self._print(f"{run.name}: ended with round {run.done} of {run.rounds}: {run.stopped}")

    def _print(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False, emoji=False, soft_wrap=self._bars is None)


class _Bars(Progress):
    """A bar for each run, and one over all if they are many, below a line that says where the runs write."""

    def __init__(self, console: Console, runs: Sequence[RunProgress], heading: str) -> None:
        self._heading = heading
        elapsed = [TimeElapsedColumn()] if len(runs) == 1 else []
        name, text = (  # all of 80 characters are needed
            TextColumn(form, markup=False, table_column=Column(no_wrap=True))
            for form in ("{task.description}", "{task.fields[text]}")
        )
        super().__init__(name, BarColumn(8), *elapsed, text, console=console)
        self._many = len(runs) > MAX_BARS
        self._all = self.add_task("all runs", total=len(runs), text="", visible=self._many)
        before = "starting" if len(runs) == 1 else "waiting"
        self._tasks_of = [
            self.add_task(run.name, start=len(runs) == 1, total=run.rounds, text=before, visible=not self._many)
            for run in runs
        ]

    def get_renderables(self) -> Iterable[RenderableType]:
        yield Text(self._heading, overflow="fold")
        yield from super().get_renderables()

    def show_stage(self, index: int, stage: str) -> None:
        self.update(self._tasks_of[index], text=stage)

    def show(self, index: int, run: RunProgress) -> None:
        bar, total = self._tasks_of[index], run.done if run.finished else run.rounds
        if not self.tasks[bar].started:
            self.start_task(bar)
        text = f"{run.done}/{run.rounds}, {run}"
        self.update(bar, completed=run.done, total=total, text=text, visible=not (self._many and run.finished))
        if run.finished:
            self.advance(self._all)


def clock(seconds: float) -> str:
    """Return ``1:02:03``, or ``2:03`` below an hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _heading(runs: Sequence[RunProgress], directories: Sequence[Path]) -> str:
    folder = os.path.commonpath(directories)
    many = f"{len(runs)} runs of {max(run.rounds for run in runs)} rounds: writing"
    return f"{many} to {folder}" if len(runs) > 1 else f"{runs[0].name}: writing to {folder}"
