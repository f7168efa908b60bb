"""Write `metrics.jsonl`, with a line for each round, and `layers.jsonl`, with the strategy's decisions."""

import json
import os
from math import isfinite

from train.callbacks.base import Callback, FinishedRound
from train.config.schema import Config
from train.rundir.files import LAYERS_FILE, METRICS_FILE
from train.rundir.records import append_layers, records_layers
from train.runtime.errors import writing
from train.runtime.files import sync_folder


class MetricsFile(Callback):
    """Appends one JSON object for each round; NaN and infinities, which JSON lacks, become null.

    Raises:
        RunError: the disk is full or not writable.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._path, self._layers = (config.directory / name for name in (METRICS_FILE, LAYERS_FILE))
        with writing(self._path):
            self._file = self._path.open("ab", buffering=0)
            sync_folder(self._path.parent)

    def after_round(self, done: FinishedRound) -> None:
        """Write the round, so that its metrics are on disk before the next round starts."""
        if records_layers(self._config, done.number):
            for task, layers in done.layers.items():
                with writing(self._layers):
                    append_layers(self._layers, done.number, task, layers)
        clean = {
            key: None if isinstance(value, float) and not isfinite(value) else value
            for key, value in done.metrics.items()
        }
        line = (json.dumps(clean) + "\n").encode()
        with writing(self._path):
            while line:  # an unbuffered file may write only a part
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        self._file.close()
