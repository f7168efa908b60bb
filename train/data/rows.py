"""Read a user's files as they are written: the named columns only, and what is text as text.

A table file has named columns. A text file is one row with the column `text`. A folder has a row for each image in its
subfolders, of which the uppermost names the class.
"""

import codecs
import csv
import glob
import gzip
import json
import logging
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from models.hub import refuse_url
from sharding.errors import UserError, join_first, safe_repr
from sharding.rounds.failures import one_line
from train.data.images import is_image

HIDDEN = (".", "__")  # how names begin that notebooks and file managers leave behind
SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing"})

log = logging.getLogger(__name__)


class Table(NamedTuple):
    """The content of one file.

    Attributes:
        names: the names of all columns.
        columns: the values of those that were asked for and are there.
        classes: the words that stand for the numbers in a column, in their order; `columns` has the words.
    """

    names: Sequence[str]
    columns: Mapping[str, list[Any]]
    classes: Mapping[str, Sequence[str]] = {}


@dataclass(frozen=True)
class Rows:
    """The rows of one split.

    Attributes:
        files: the files that they are from, each with its number of rows; or one folder.
        columns: the values of the columns that were asked for.
        classes: the words that the files' metadata define for a column, in their order.
    """

    files: Sequence[tuple[Path, int]]
    columns: Mapping[str, list[Any]]
    classes: Mapping[str, Sequence[str]]

    def __len__(self) -> int:
        return sum(count for _, count in self.files)

    @property
    def source(self) -> str:
        """Where they are from, for messages."""
        first, others = self.files[0][0], len(self.files) - 1
        return f"{first} and {others} more" if others else str(first)

    def place(self, row: int) -> str:
        """Return where a row, counted from 0, is from: its number in its file, counted from 1."""
        ends = [*accumulate(count for _, count in self.files)]
        file = bisect_right(ends, row)
        number = row - (ends[file - 1] if file else 0) + 1
        return f"row {number} of {self.files[file][0]}" if len(ends) > 1 else f"row {number}"

    def texts(self, name: str) -> list[str]:
        """Return a column of texts; raise a UserError if a value is missing, is no text, or is blank."""
        texts = self._complete(name)
        self._refuse([row for row, text in enumerate(texts) if not isinstance(text, str)], f"no text in {name}")
        self._refuse([row for row, text in enumerate(texts) if not text.strip()], f"an empty text in {name}")
        return texts

    def names(self, name: str) -> list[str]:
        """Return a column of classes or clients as text: `007` is not `7`, and a date is a word.

        Raise a UserError if a value is missing, or is a fraction or a list, or if a file has numbers and words.
        """
        values = self._complete(name)
        words = [_word(value) for value in values]
        others = [row for row, word in enumerate(words) if word is None]
        self._refuse(others, f"neither a whole number nor a word in the column {name}")
        if len({isinstance(value, str) for value in values}) > 1:
            raise UserError(f"{self.source} mixes numbers and words in the column {name}; use one of them")
        return [str(word) for word in words]

    def images(self, name: str, root: Path) -> tuple[list[bytes], Callable[[int], str]]:
        """Return a column of encoded images, and where each is from. Paths in a table are relative to `root`.

        Raise a UserError if a value is missing or is no image, or a file cannot be read.
        """
        images: list[dict[str, Any]] = [
            value if isinstance(value, dict) else {"bytes": value, "path": value} for value in self._complete(name)
        ]
        empty = [
            row
            for row, image in enumerate(images)
            if not isinstance(image.get("bytes"), bytes) and not isinstance(image.get("path"), str)
        ]
        self._refuse(empty, f"no image in {name}")

        def place(row: int) -> str:
            path = images[row].get("path")
            return str(path) if self.files[0][0].is_dir() else f"{self.source}, column {name}, {self.place(row)}"

        files = []
        for row, image in enumerate(images):
            stored = image.get("bytes")
            try:
                files.append(stored if isinstance(stored, bytes) else (root / image["path"]).read_bytes())
            except (OSError, ValueError) as error:
                raise UserError(f"{place(row)} is no image: {one_line(error)}") from error
        return files, place

    def _complete(self, name: str) -> list[Any]:
        values = self.columns[name]
        self._refuse([row for row, value in enumerate(values) if value is None], f"no value in the column {name}")
        return values

    def _refuse(self, rows: Sequence[int], problem: str) -> None:
        if rows:
            raise UserError(
                f"{self.source}: {len(rows)} of {len(self)} rows have {problem}, the first is {self.place(rows[0])}; "
                "correct or remove them"
            )


def ordered(names: Iterable[str]) -> list[str]:
    """Return the different names, sorted: as numbers if all are whole numbers without leading zeros, else as words."""
    different = {*names}
    numbers = all(re.fullmatch(r"0|-?[1-9]\d*", name, re.ASCII) for name in different)
    return sorted(different, key=int) if numbers else sorted(different)


def _word(value: object) -> str | None:
    """Return a class or client as text, or None if it is none."""
    if isinstance(value, float | Decimal) and value % 1 == 0:  # whole numbers become floats where some are missing
        value = int(value)
    return str(value) if isinstance(value, str | int | date) else None


def find_files(option: str, patterns: str | Sequence[str], root: Path) -> list[Path]:
    """Return the files of each path or glob, relative to `root`, in the order of their names; or one folder of images.

    Raise a UserError with the `option` that has the patterns if none matches, or there is no pattern.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not patterns or not all(patterns):
        raise UserError(f"data.{option} is empty; give paths or globs of its files, or leave it out")
    for pattern in patterns:
        refuse_url(pattern, f"data.{option}")
    paths = [path for pattern in patterns for path in _matches(option, root / Path(pattern).expanduser())]
    if len(paths) > 1 and any(path.is_dir() for path in paths):
        raise UserError(f"data.{option}={join_first(patterns)} must be one folder of images, or files")
    return paths


def read_rows(
    option: str, paths: Sequence[Path], columns: Mapping[str, str], separator: str | None, encoding: str
) -> Rows:
    """Read the `columns`, by the option that names each, of files of one format, or of a folder of images.

    Columns of a csv file are separated by a comma by default, and a tab for `.tsv`. Raise a UserError with the option
    of the files if the format is unknown, or a file is empty or damaged, or lacks a column.
    """
    if paths[0].is_dir():
        return _read_folder(paths[0], columns)
    kinds = {_kind(path) for path in paths}
    if len({FORMATS.get(kind) for kind in kinds}) > 1 or not kinds <= FORMATS.keys():
        named = join_first(sorted({_kind(path) or path.name for path in paths}))
        raise UserError(f"data.{option} names files of the kinds {named}; give one kind of {', '.join(FORMATS)}")
    kind = FORMATS[kinds.pop()]
    readers: dict[str, Callable[[Path, Sequence[str]], Table]] = {
        "csv": partial(_read_csv, separator=separator, encoding=encoding),
        "json": partial(_read_json, encoding=encoding),
        "text": partial(_read_text, encoding=encoding),
        "parquet": _read_parquet,
    }
    wanted = [*dict.fromkeys(columns.values())]
    tables = [_read_table(readers[kind], kind, path, wanted) for path in paths]
    for path, table in zip(paths, tables, strict=True):
        _check_columns(path, kind, table.names, columns)
    values = {name: [value for table in tables for value in table.columns[name]] for name in wanted}
    counts = [len(table.columns[wanted[0]]) for table in tables]
    rows = Rows([*zip(paths, counts, strict=True)], values, tables[0].classes)
    if not len(rows):
        raise UserError(f"{rows.source} has no rows; replace it with a valid file")
    return rows


def _kind(path: Path) -> str:
    """Return how the name of a file ends, without the end of a compressed one."""
    return (path.with_suffix("") if path.suffix.lower() == ".gz" else path).suffix.lower()


def _matches(option: str, pattern: Path) -> list[Path]:
    if pattern.exists():
        return [pattern]
    paths = [Path(path) for path in sorted(glob.glob(str(pattern), recursive=True))]
    if not paths:
        raise UserError(f"no file {pattern.absolute()}; set data.{option} to a path or glob, and data.root=…")
    return paths


def _read_table(read: Callable[[Path, Sequence[str]], Table], kind: str, path: Path, wanted: Sequence[str]) -> Table:
    try:
        if not path.stat().st_size:
            raise UserError(f"{path} is empty; replace it with a valid file")
        return read(path, wanted)
    except (UserError, ImportError):
        raise
    except Exception as error:  # readers raise many kinds of errors
        hint = "; set data.encoding=…" if isinstance(error, UnicodeError | LookupError) else ""
        raise UserError(f"cannot read {path} as {kind}: {one_line(error) or type(error).__name__}{hint}") from error


def _check_columns(path: Path, kind: str, names: Sequence[str], columns: Mapping[str, str]) -> None:
    """Refuse a file that lacks a column, or has two of its name."""
    for option, name in columns.items():
        if name not in names:
            one = "; if that is more than one column, set data.separator" if len(names) == 1 and kind == "csv" else ""
            listed = join_first(list(names), 20)
            raise UserError(f"{path} has no column {safe_repr(name)}, but {listed}; set data.{option}=…{one}")
        if names.count(name) > 1:
            raise UserError(f"{path} has {names.count(name)} columns {safe_repr(name)}; rename all but one")


def _opened(path: Path, encoding: str) -> TextIO:
    """Open a text file, which may be compressed; a mark of UTF-8 at its beginning is no text."""
    encoding = "utf-8-sig" if codecs.lookup(encoding).name == "utf-8" else encoding
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding=encoding, newline="")
    return path.open(encoding=encoding, newline="")


def _read_csv(path: Path, wanted: Sequence[str], separator: str | None, encoding: str) -> Table:
    """Read a csv file; an empty field is a missing value."""
    csv.field_size_limit(2**31 - 1)  # a text may be long
    separator = separator or ("\t" if _kind(path) == ".tsv" else ",")
    with _opened(path, encoding) as file:
        lines = csv.reader(file, delimiter=separator, strict=True)
        names = next(lines, [])
        places = {name: names.index(name) for name in wanted if name in names}
        columns: dict[str, list[Any]] = {name: [] for name in places}
        try:
            for fields in lines:
                if fields and len(fields) != len(names):  # a blank line has none
                    raise ValueError(f"it has {len(fields)} fields, and the header has {len(names)}")
                for name, place in places.items() if fields else ():
                    columns[name].append(fields[place] or None)
        except (csv.Error, ValueError) as error:
            if isinstance(error, UnicodeError):
                raise
            raise ValueError(f"line {lines.line_num}: {error}; correct it, or the quotes before it") from error
    return Table(names, columns)


def _read_json(path: Path, wanted: Sequence[str], encoding: str) -> Table:
    """Read a file with a list of objects, or with an object in each line."""
    with _opened(path, encoding) as file:
        text = file.read()
    if text.lstrip().startswith("["):
        records = json.loads(text)
    else:
        records = []
        for number, line in enumerate(text.split("\n"), 1):
            try:
                records += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                raise ValueError(f"line {number}: {error}; write an object in each line, or a list of them") from error
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise TypeError(f"row {number} is {safe_repr(record)}, not an object with names")
    names = [*dict.fromkeys(name for record in records for name in record)]
    return Table(names, {name: [record.get(name) for record in records] for name in wanted if name in names})


def _read_parquet(path: Path, wanted: Sequence[str]) -> Table:
    """Read a parquet file; the metadata of Hugging Face's `datasets` may name the classes of a column of numbers."""
    from pyarrow import parquet  # noqa: PLC0415 - heavy

    schema = parquet.read_schema(path)
    present = [name for name in wanted if name in schema.names]
    table = parquet.read_table(path, columns=present, partitioning=None)
    columns = {name: table.column(name).to_pylist() for name in present}
    features = json.loads((schema.metadata or {}).get(b"huggingface", "{}")).get("info", {}).get("features", {})
    classes = {name: words for name in present if (words := features.get(name, {}).get("names"))}
    for name, words in classes.items():  # -1 is a missing class
        columns[name] = [None if value not in range(len(words)) else words[value] for value in columns[name]]
    return Table(schema.names, columns, classes)


def _read_text(path: Path, wanted: Sequence[str], encoding: str) -> Table:
    """Read a text file as one row."""
    with _opened(path, encoding) as file:
        return Table(["text"], {"text": [file.read()]} if "text" in wanted else {})


FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".txt": "text",
}


def _read_folder(folder: Path, columns: Mapping[str, str]) -> Rows:
    """Return the images in a folder: their files, and the names of the subfolders that are their classes.

    Hidden files and folders, which notebooks and file managers leave behind, are no images and no classes. Other files
    are counted in a warning.

    Raises:
        UserError: there are no images, or none in one of the subfolders, or the subfolders are splits.
    """
    found: dict[str, list[Path]] = {}
    others: list[Path] = []
    for path in sorted(folder.glob("*/**/*")):
        parts = path.relative_to(folder).parts
        if any(part.startswith(HIDDEN) for part in parts) or path.is_dir():
            continue
        (found.setdefault(parts[0], []) if is_image(path) else others).append(path)
    classes = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(HIDDEN))
    if not found:
        raise UserError(
            f"{folder} has no images; it needs a folder for each class, with images. Tables are named by their files, "
            f"as {folder / '*.csv'}"
        )
    if empty := [name for name in classes if name not in found]:
        raise UserError(f"{folder} has no images in {join_first(empty)}; remove what is no class, or add its images")
    if len(classes) > 1 and SPLITS.issuperset(map(str.lower, classes)):
        named = join_first([str(folder / name) for name in classes])
        raise UserError(f"{folder} has splits, not classes: name {named} as data.train and data.test")
    if others:
        log.warning("%s: left out %d files that are no images: %s", folder, len(others), join_first(others))
    paths = [path for name in classes for path in found[name]]
    labels = [name for name in classes for _ in found[name]]
    values = {columns["image"]: [str(path.absolute()) for path in paths], columns["label"]: labels}
    return Rows([(folder, len(paths))], values, {})
