"""Warnings on the console: above the progress bars on a terminal, else one line each."""

import logging

from rich.console import Console
from rich.logging import RichHandler


class Lines(logging.Handler):
    """Prints each record in one line without wrapping it, so that paths can be copied."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        self._console.print(self.format(record), highlight=False, markup=False, soft_wrap=True)


def handler(console: Console) -> logging.Handler:
    """Return the handler that shows the log on this console."""
    return RichHandler(console=console, show_path=False) if console.is_terminal else Lines(console)
