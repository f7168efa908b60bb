"""Format numbers and tables as text, for reports, tables and benchmarks."""

import csv
from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from statistics import mean, stdev

from train.runtime.files import write_whole

NOTHING = "–"  # in place of a missing value


def mean_and_spread(values: Sequence[float], form: str = ".1f") -> str:
    """Return ``mean ± standard deviation``; the mean for a single value; a dash without values."""
    if not values:
        return NOTHING
    return f"{mean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table, without a final line break.

    The first column holds text; the others hold numbers, aligned right.
    """
    rule = "|---|" + "---:|" * (len(header) - 1)
    head, *body = (f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows))
    return "\n".join([head, rule, *body])


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write a table as CSV, atomically, and return its path."""
    text = StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())
    return path
