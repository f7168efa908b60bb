"""A progress bar over rounds."""

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from train.rounds import Metrics


class RoundProgress(Progress):
    """One bar for all rounds of all runs, with the present run's name and last test accuracy beside it."""

    def __init__(self, console: Console, total: int) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[accuracy]}"),
            console=console,
        )
        self._bar = self.add_task("", total=total, accuracy="")
        self._started = 0  # rounds of the runs started so far

    def follow(self, name: str, rounds: int) -> Callable[[Metrics], None]:
        """Return what a run of that name and length calls with each round's metrics."""
        before = self._started
        self._started += rounds
        self.update(self._bar, description=name, completed=before, accuracy="")

        def advance(metrics: Metrics) -> None:
            accuracy, done = metrics.get("test_accuracy"), metrics["round"]
            assert isinstance(done, int)
            shown = {"accuracy": f"test accuracy {100 * accuracy:.1f} %"} if isinstance(accuracy, float) else {}
            self.update(self._bar, completed=before + done + 1, **shown)

        return advance
