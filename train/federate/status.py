"""The report of the server's app to `launch`: a small file in the run's directory."""

import json
from typing import Any

from train.config.schema import Config
from train.utils.files import write_atomically

FOLDER = "federation"  # in the run's directory: keys, data and logs of what `launch` started
LOCK_FILE = "federation.lock"  # held by the process that started it
FINISHED = "finished"


class Status:
    """The clients that have joined, those the server waits for, and how the run ended.

    Without the folder that `launch` makes in the run's directory, nothing is written.
    """

    def __init__(self, config: Config) -> None:
        self._path = config.directory / FOLDER / "status.json"

    def read(self) -> dict[str, Any]:
        """Return the latest report."""
        status = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        return {"joined": [], "waiting_for": [], "ended": None} | status

    def set(self, **values: object) -> None:
        """Replace the values of these keys."""
        if self._path.parent.is_dir():
            write_atomically(self._path, json.dumps(self.read() | values).encode())
