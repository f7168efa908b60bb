"""A progress bar for each run."""

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sharding.errors import UserError
from train.config import Config
from train.rounds import Metrics

FEW = 12  # so many bars fit on a screen; of more runs, only those under way have one


class RoundProgress(Progress):
    """One bar a run over its rounds, with the last test accuracy beside it.

    Args:
        console: to draw on.
        configs: of the runs, in the order by which `show` counts them.
        names: of the runs; strategy and seed if not given.
    """

    def __init__(self, console: Console, configs: Sequence[Config], names: Sequence[str] = ()) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[accuracy]}"),
            console=console,
        )
        self._many = len(configs) > FEW
        self._all = self.add_task("all runs", total=len(configs), accuracy="", visible=self._many)
        self._bars = [
            self.add_task(name, start=False, total=config.rounds, accuracy="", visible=not self._many)
            for config, name in zip(configs, names or _names(configs), strict=True)
        ]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Take the bars away where a mistake kept every run from starting: its one line says all."""
        self.live.transient = isinstance(error, UserError) and not any(self.tasks[bar].started for bar in self._bars)
        super().__exit__(kind, error, at)

    def show(self, place: int, metrics: Metrics) -> None:
        """Show one round of the run at that place."""
        bar, accuracy, done = self._bars[place], metrics.get("test_accuracy"), metrics["round"]
        assert isinstance(done, int)
        if not self.tasks[bar].started:
            self.start_task(bar)
        finished = done + 1 == self.tasks[bar].total
        self.update(bar, completed=done + 1, visible=not (self._many and finished))
        if finished:
            self.advance(self._all)
        if isinstance(accuracy, float):
            self.update(bar, accuracy=f"test accuracy {100 * accuracy:.1f} %")


def _names(configs: Sequence[Config]) -> list[str]:
    seeds = len({config.seed for config in configs}) > 1
    return [f"{config.strategy} {config.seed}" if seeds else config.strategy for config in configs]
