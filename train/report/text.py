"""Numbers and tables as text: the one form that reports, tables and benchmarks share."""

import csv
from collections.abc import Iterable, Sequence
from io import StringIO
from pathlib import Path
from statistics import mean, stdev

from train.runtime.files import write_whole

NOTHING = "–"  # stands where a value is missing


def mean_and_spread(values: Sequence[float], form: str = ".1f") -> str:
    """Return ``mean ± standard deviation``, only the mean of a single value, and a dash of none."""
    if not values:
        return NOTHING
    return f"{mean(values):{form}}" + (f" ± {stdev(values):{form}}" if len(values) > 1 else "")


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]], left: int = 1) -> str:
    """Return a Markdown table without a line break at its end.

    Args:
        header: of the columns.
        rows: a cell a column.
        left: so many columns, from the first on, hold words; the others hold numbers, to the right.
    """
    rule = "|" + "---|" * min(left, len(header)) + "---:|" * (len(header) - left)
    head, *body = (f"| {' | '.join(map(str, cells))} |" for cells in (header, *rows))
    return "\n".join([head, rule, *body])


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write a table as CSV and return its path; the file is whole or not there."""
    text = StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(header)
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())
    return path
