"""Handle Ctrl-C while the rest of the program is still being imported.

Import this module before anything else. It acts only under `python -m train`; other programs that import the package
keep their own handlers.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

PROGRAM = str(Path(__file__).parents[1] / "__main__.py")


def leave(number: int, frame: FrameType | None) -> None:
    """Exit; nothing has been started yet."""
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


def ready() -> None:
    """Hand Ctrl-C over to the program."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if sys.argv and sys.argv[0] == PROGRAM and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, leave)
