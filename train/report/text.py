"""Format numbers and tables as text, for reports, tables and benchmarks."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev

import pandas as pd

from train.utils.files import write_atomically

NOTHING = "–"  # in place of a missing value


def mean_and_spread(values: Iterable[float], form: str = ".1f") -> str:
    """Return ``mean ± standard deviation``; the mean for a single value; a dash without values."""
    values = list(values)
    if not values:
        return NOTHING
    return f"{mean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def markdown_table(header: Iterable[object], rows: Iterable[Iterable[object]], left: int = 1) -> str:
    """Return a Markdown table, without a final line break.

    The first `left` columns hold text; the others hold numbers, aligned right.
    """
    head, *body = ([*map(str, cells)] for cells in (header, *rows))
    rule = "|" + "---|" * left + "---:|" * (len(head) - left)
    first, *lines = (f"| {' | '.join(cells)} |" for cells in (head, *body))
    return "\n".join([first, rule, *lines])


def frame_table(frame: pd.DataFrame, left: int = 1) -> str:
    """Return a frame as a Markdown table, without its index."""
    return markdown_table(frame.columns, frame.itertuples(index=False), left)


def write_csv(path: Path, frame: pd.DataFrame, columns: Sequence[str] | None = None) -> Path:
    """Write a frame as CSV, atomically, without its index, and return the path."""
    write_atomically(path, frame.to_csv(columns=columns, index=False, lineterminator="\r\n").encode())
    return path
