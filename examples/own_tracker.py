"""A tracker: a CSV file of accuracies. `--import examples.own_tracker tracker=csv`"""

from train.callbacks import Callback, FinishedRound
from train.config.registries import TRACKERS
from train.config.schema import Config


class CsvTracker(Callback):
    """Writes `accuracy.csv` into the run's directory."""

    def __init__(self, config: Config) -> None:
        self.file = (config.directory / "accuracy.csv").open("a", encoding="utf-8")

    def after_round(self, done: FinishedRound) -> None:
        """Write the rounds that were evaluated."""
        if "test_accuracy" in done.metrics:
            self.file.write(f"{done.number},{done.metrics['test_accuracy']}\n")

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        self.file.close()


TRACKERS["csv"] = CsvTracker
