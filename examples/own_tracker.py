"""A tracker: a CSV file of accuracies. `--import examples.own_tracker tracker=csv`"""

from train.callbacks import Callback, Plans
from train.config.schema import Config
from train.experiment.metrics import RoundMetrics
from train.registries import TRACKERS


class CsvTracker(Callback):
    """Writes `accuracy.csv` into the run's directory."""

    def __init__(self, config: Config) -> None:
        self.file = (config.directory / "accuracy.csv").open("a", encoding="utf-8")

    def after_round(self, metrics: RoundMetrics, plan: Plans) -> None:
        """Write the rounds that were evaluated."""
        if metrics.test_accuracy is not None:
            self.file.write(f"{metrics.round},{metrics.test_accuracy}\n")

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        self.file.close()


TRACKERS["csv"] = CsvTracker
