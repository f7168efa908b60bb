"""Files with a line for each round; lines that are spoiled or cut off are never taken for a round."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import SEEK_END
from pathlib import Path
from typing import Any

from train.runtime.errors import writing
from train.runtime.files import write_whole


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the rounds that a file of metrics has from the first on, up to one that is missing or spoiled."""
    return rounds_among(whole_lines(path))


def rounds_among(texts: Iterable[bytes]) -> list[dict[str, Any]]:
    """Return the rounds in lines of metrics from the first on, up to one that is missing or spoiled."""
    lines: list[dict[str, Any]] = []
    for metrics in sound(texts):
        if metrics.get("round") != len(lines):
            break
        lines.append(metrics)
    return lines


def sound(texts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the content of each line, up to one that is spoiled."""
    for text in texts:
        try:
            told = json.loads(text)
        except ValueError:
            return
        if not isinstance(told, dict):
            return
        yield told


def has_ended(lines: Sequence[Mapping[str, Any]], rounds: int) -> bool:
    """Return whether a run of so many rounds has ended with these lines, early or not."""
    return len(lines) == rounds or (bool(lines) and "stopped" in lines[-1])


def keep_lines(path: Path, count: int | None = None) -> None:
    """Drop what a file has after the first `count` lines, and in any case a last one that was cut off in writing."""
    kept = b"".join(whole_lines(path)[:count])
    if path.exists() and path.read_bytes() != kept:
        write_whole(path, kept)


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, none if there is no file; a last one that was cut off in writing is left out."""
    if not path.exists():
        return []
    with writing(path):
        return split(path.read_bytes())


class NewLines:
    """What a file of metrics has got since it was last read; only that is read.

    Args:
        path: of the file, which may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def read(self) -> list[dict[str, Any]]:
        """Return the rounds completed since the last call; of a file that was cut, those that follow."""
        if not self._path.exists():
            return []
        with writing(self._path), self._path.open("rb") as file:
            self._read = min(self._read, file.seek(0, SEEK_END))
            file.seek(self._read)
            lines = split(file.read())
        self._read += sum(map(len, lines))
        return list(sound(lines))


def split(content: bytes) -> list[bytes]:
    """Return the lines of a file's content, without a last one that was cut off in writing."""
    return [line for line in content.splitlines(keepends=True) if line.endswith(b"\n")]


def totals(lines: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Return (MB moved so far, best test accuracy so far) of a run's lines; −1 before any evaluation."""
    moved = sum((line["bytes_down"] + line["bytes_up"]) / 1e6 for line in lines)
    return moved, max((line["test_accuracy"] for line in lines if "test_accuracy" in line), default=-1.0)
