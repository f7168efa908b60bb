"""A tracker: a CSV file of accuracies. `--import examples.own_tracker tracking.use=[csv]`"""

from typing import Any

from train.config import Config
from train.tracking import TRACKERS, Tracker


class CsvTracker(Tracker):
    """Writes `accuracy.csv` into the run's directory."""

    def __init__(self, config: Config) -> None:
        self.file = (config.directory / "accuracy.csv").open("a", encoding="utf-8")

    def log(self, metrics: dict[str, Any]) -> None:
        """Write the rounds that were evaluated."""
        if "test_accuracy" in metrics:
            self.file.write(f"{metrics['round']},{metrics['test_accuracy']}\n")

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        self.file.close()


TRACKERS["csv"] = CsvTracker
