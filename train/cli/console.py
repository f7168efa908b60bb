"""Warnings where a run is watched: above its bars on a terminal, a line each elsewhere."""

import logging

from rich.console import Console
from rich.logging import RichHandler


class Lines(logging.Handler):
    """Prints a line each, however long: a path that is wrapped cannot be copied."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print one."""
        self._console.print(self.format(record), highlight=False, markup=False, soft_wrap=True)


def handler(console: Console) -> logging.Handler:
    """Return what shows the log on this console."""
    return RichHandler(console=console, show_path=False) if console.is_terminal else Lines(console)
