"""What the server's app reports to `launch`, which started it: a small file in the run's directory."""

import json
from typing import Any

from train.config.schema import Config
from train.runtime.files import write_whole

FOLDER = "federation"  # in the run's directory: keys, data and logs of what `launch` started
FINISHED = "finished"


class Status:
    """Which clients have joined, for which the server waits, and how the run has ended, if it has.

    Args:
        config: of the run. Where `launch` has made no folder in its directory, nothing is written.
    """

    def __init__(self, config: Config) -> None:
        self._path = config.directory / FOLDER / "status.json"

    def read(self) -> dict[str, Any]:
        """Return what was reported last."""
        held = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {}
        return {"joined": [], "waiting_for": [], "ended": None} | held

    def set(self, **values: object) -> None:
        """Replace what is reported under these keys."""
        if self._path.parent.is_dir():
            write_whole(self._path, json.dumps(self.read() | values).encode())
