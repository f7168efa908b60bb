"""A progress bar for each run."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from train.config import Config
from train.rounds import Metrics


class RoundProgress(Progress):
    """One bar a run over its rounds, with the last test accuracy beside it.

    Args:
        console: to draw on.
        configs: of the runs, in the order by which `show` counts them.
    """

    def __init__(self, console: Console, configs: list[Config]) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[accuracy]}"),
            console=console,
        )
        seeds = len({config.seed for config in configs}) > 1
        self._bars = [
            self.add_task(f"{c.strategy} {c.seed}" if seeds else c.strategy, start=False, total=c.rounds, accuracy="")
            for c in configs
        ]

    def show(self, place: int, metrics: Metrics) -> None:
        """Show one round of the run at that place."""
        bar, accuracy, done = self._bars[place], metrics.get("test_accuracy"), metrics["round"]
        assert isinstance(done, int)
        if not self.tasks[bar].started:
            self.start_task(bar)
        self.update(bar, completed=done + 1)
        if isinstance(accuracy, float):
            self.update(bar, accuracy=f"test accuracy {100 * accuracy:.1f} %")
