"""The log on consoles that are read."""

import io
import logging

from rich.console import Console

from train.cli.commands import handler


def test_off_a_terminal_a_warning_is_one_line_however_long():
    out, path = io.StringIO(), "/" + "/".join(["folder-[1]"] * 20)
    record = logging.LogRecord("train", logging.WARNING, __file__, 1, "see %s", (path,), None)
    handler(Console(file=out, width=80)).emit(record)
    assert out.getvalue().endswith(f" WARNING see {path}\n")
    assert out.getvalue().count("\n") == 1
