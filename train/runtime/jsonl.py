"""Read and write files with one line per round. Damaged or incomplete lines never count as a round."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from sharding.errors import UserError
from sharding.failures import one_line
from train.runtime.errors import writing
from train.runtime.files import write_whole

Record = TypeVar("Record")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rounds in a metrics file, up to the first that is missing or damaged."""
    return rounds_among(whole_lines(path))


def rounds_among(texts: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the rounds in these lines of metrics, up to the first that is missing or damaged."""
    lines: list[dict[str, Any]] = []
    for metrics in sound(texts):
        if metrics.get("round") != len(lines):
            break
        lines.append(metrics)
    return lines


def sound(texts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the content of each line, up to the first damaged one."""
    for text in texts:
        try:
            content = from_json(text)
        except ValueError:
            return
        if not isinstance(content, dict):
            return
        yield content


MOST_LOST = 5  # a run ends after this many rounds in a row without a usable update


def from_json(text: str | bytes) -> Any:
    """Parse a text in JSON; whatever is wrong with it is a `ValueError`."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_record(path: Path, read: Callable[[Any], Record]) -> Record:
    """Return what a function makes of a file in JSON that a run has written.

    Raises:
        UserError: the file is damaged.
    """
    try:
        return read(from_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}; delete it, and it will be written again") from error


def has_ended(lines: Sequence[Mapping[str, Any]], rounds: int) -> bool:
    """Return whether a run of `rounds` rounds has ended with these lines, early or not, and did not diverge."""
    ended = len(lines) == rounds or (bool(lines) and "stopped" in lines[-1])
    return ended and not has_diverged(lines, rounds)


def has_diverged(lines: Sequence[Mapping[str, Any]], rounds: int) -> bool:
    """Return whether the last rounds of a run of `rounds` rounds had no usable update, which ends it."""
    limit = min(MOST_LOST, rounds)
    return len(lines) >= limit and all(map(is_lost, lines[-limit:]))


def is_lost(line: Mapping[str, Any]) -> bool:
    """Return whether a round had no usable update."""
    return bool(line.get("num_failed")) and not line.get("num_aggregated")


def keep_lines(path: Path, count: int | None = None) -> None:
    """Truncate a file after its first `count` lines, and drop an incomplete last line."""
    kept = b"".join(whole_lines(path)[:count])
    if path.exists() and (path.read_bytes() != kept or path.stat().st_nlink > 1):  # a copy by hard links stays as it is
        write_whole(path, kept)


def whole_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file; none if there is no file."""
    if not path.exists():
        return []
    with writing(path):
        return split(path.read_bytes())


def split(content: bytes) -> list[bytes]:
    """Return the complete lines of a file's content."""
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


def megabytes(line: Mapping[str, float]) -> float:
    """Return what all clients moved in a round, down and up, in MB, from its line of metrics."""
    return (line["bytes_down"] + line["bytes_up"]) / 1e6


def best_accuracy(lines: Iterable[Mapping[str, Any]]) -> float:
    """Return the best test accuracy of these rounds, −1 before any evaluation."""
    return max((line["test_accuracy"] for line in lines if "test_accuracy" in line), default=-1.0)
