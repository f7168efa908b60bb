"""Where metrics go: always a JSONL file, and Weights & Biases when asked."""

import json
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from sharding.errors import UserError
from train.config import Config


class Tracker(Protocol):
    """Takes one flat dict of metrics a round."""

    def log(self, metrics: dict[str, Any]) -> None:
        """Record one round."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class JsonlTracker:
    """Appends one JSON object a line; NaN and infinities, which JSON has not, become null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: dict[str, Any]) -> None:
        """Write one line, and have it on disk before the next round."""
        clean = {
            key: None if isinstance(value, float) and not isfinite(value) else value for key, value in metrics.items()
        }
        self._file.write(json.dumps(clean) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WandbTracker:
    """Sends every number to Weights & Biases; offline mode needs no account."""

    def __init__(self, config: Config) -> None:
        try:
            import wandb  # noqa: PLC0415  # an extra, imported where used
        except ImportError as error:
            raise UserError("tracking.wandb needs the package wandb: pip install 'spectral-sharding[wandb]'") from error
        try:
            self._run = wandb.init(
                project=config.tracking.project,
                name=config.directory.name,
                dir=config.directory,
                mode=config.tracking.wandb,
                config=config.model_dump(mode="json"),
            )
        except wandb.errors.Error as error:
            raise UserError(f"W&B: {' '.join(str(error).split())}; tracking.wandb=offline needs no account") from error

    def log(self, metrics: dict[str, Any]) -> None:
        """Log the numbers of one round, with the round as the step."""
        numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        self._run.log(numbers, step=metrics["round"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def make_trackers(config: Config) -> list[Tracker]:
    """Return the trackers a configuration asks for; the run's directory must exist."""
    trackers: list[Tracker] = [] if config.tracking.wandb == "disabled" else [WandbTracker(config)]
    return [*trackers, JsonlTracker(config.directory / "metrics.jsonl")]
