"""Read and write files with one line per round. Damaged or incomplete lines never count as a round."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from sharding.errors import UserError
from sharding.rounds.failures import one_line
from train.utils.errors import writing
from train.utils.files import write_atomically

Record = TypeVar("Record")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rounds in a metrics file, up to the first that is missing or damaged."""
    return rounds_among(complete_lines(path))


def rounds_among(texts: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the rounds in these lines of metrics, up to the first that is missing or damaged."""
    lines: list[dict[str, Any]] = []
    for metrics in valid_objects(texts):
        if metrics.get("round") != len(lines):
            break
        lines.append(metrics)
    return lines


def valid_objects(texts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the content of each line, up to the first damaged one."""
    for text in texts:
        try:
            content = from_json(text)
        except ValueError:
            return
        if not isinstance(content, dict):
            return
        yield content


def from_json(text: str | bytes) -> Any:
    """Parse JSON; any error is a `ValueError`."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def read_record(path: Path, read: Callable[[Any], Record]) -> Record:
    """Build a record from a JSON file that a run has written, or raise a UserError if the file is damaged."""
    try:
        return read(from_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cannot read {path}: {one_line(error)}; delete it, and it will be written again") from error


def keep_lines(path: Path, count: int | None = None) -> None:
    """Truncate a file after its first `count` lines, and drop an incomplete last line."""
    kept = b"".join(complete_lines(path)[:count])
    if path.exists() and (path.read_bytes() != kept or path.stat().st_nlink > 1):  # a copy by hard links stays as it is
        write_atomically(path, kept)


def complete_lines(path: Path) -> list[bytes]:
    """Return the complete lines of a file; none if there is no file."""
    if not path.exists():
        return []
    with writing(path):
        return split(path.read_bytes())


def split(content: bytes) -> list[bytes]:
    """Return the complete lines of a file's content."""
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]
