"""Read a user's files through Hugging Face's `datasets`, and check the columns that training needs.

A table file has named columns. A text file is one row with the column `text`. A folder has a row for each image in its
subfolders, of which the uppermost names the class. Nothing is kept in a cache.
"""

import glob
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sharding.errors import UserError, join_first, safe_repr
from sharding.rounds.failures import one_line

EXTRA = "pip install 'spectral-sharding[transformers]'"
FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
    ".txt": "text",
}
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True)
class Rows:
    """The rows of one split.

    Attributes:
        source: where they are from, for messages.
        table: a `datasets.Dataset`.
    """

    source: str
    table: Any

    def __len__(self) -> int:
        return len(self.table)

    def column(self, option: str, name: str) -> list[Any]:
        """Return the values of a column, of which none is missing.

        Args:
            option: the key that names the column, for messages.
            name: of the column.

        Raises:
            UserError: there is no such column, or a row has no value in it.
        """
        names = self.table.column_names
        if name not in names:
            one = "; if that is more than one column, set data.separator" if len(names) == 1 else ""
            raise UserError(
                f"{self.source} has no column {safe_repr(name)}, but {join_first(names, 20)}; set data.{option}=…{one}"
            )
        values: list[Any] = self.table[name][:]
        self.refuse([row for row, value in enumerate(values) if value is None], f"no value in the column {name}")
        return values

    def texts(self, name: str) -> list[str]:
        """Return a column of texts.

        Raises:
            UserError: as `column`, or a value is no text, or is blank.
        """
        texts = self.column("text", name)
        self.refuse([row for row, text in enumerate(texts) if not isinstance(text, str)], f"no text in {name}")
        self.refuse([row for row, text in enumerate(texts) if not text.strip()], f"an empty text in {name}")
        return texts

    def names(self, option: str, name: str) -> list[Hashable]:
        """Return a column of classes or clients: whole numbers or words, or the words that stand for its numbers.

        Raises:
            UserError: as `column`, or a value is of another type, or numbers and words are mixed.
        """
        values = self.column(option, name)
        words = self.class_names(name)
        if words:
            outside = [row for row, value in enumerate(values) if not 0 <= value < len(words)]
            self.refuse(outside, f"no class in the column {name}")
            return [words[value] for value in values]
        others = [row for row, value in enumerate(values) if not isinstance(value, int | str)]
        self.refuse(others, f"neither a whole number nor a word in the column {name}")
        if len({isinstance(value, str) for value in values}) > 1:
            raise UserError(f"{self.source} mixes numbers and words in the column {name}; use one of them")
        return values

    def class_names(self, name: str) -> list[str]:
        """Return the words that the file's metadata give for the numbers in a column; none for other columns."""
        return getattr(self.table.features[name], "names", None) or []

    def files(self, name: str) -> list[bytes]:
        """Return a column of encoded images, of which some may be in files of their own.

        Raises:
            UserError: as `column`, or a value is no image, or a file cannot be read.
        """
        from datasets import Image  # noqa: PLC0415 - an extra

        self.column("image", name)
        try:
            images = self.table.cast_column(name, Image(decode=False))[name][:]
            return [image["bytes"] or Path(image["path"]).read_bytes() for image in images]
        except Exception as error:
            raise UserError(f"{self.source} has no images in the column {name}: {one_line(error)}") from error

    @property
    def is_folder(self) -> bool:
        """Whether the rows are the images of a folder."""
        return Path(self.source).is_dir()

    def refuse(self, rows: Sequence[int], problem: str) -> None:
        """Raise a UserError if any rows, counted from 0, have a problem."""
        if rows:
            raise UserError(
                f"{self.source}: {len(rows)} of {len(self)} rows have {problem}, the first is row {rows[0] + 1}; "
                "correct or remove them"
            )


def read_rows(option: str, patterns: str | Sequence[str], root: Path, separator: str | None, encoding: str) -> Rows:
    """Read files of one format, in the order of their names for each pattern.

    Args:
        option: the key that names them, for messages.
        patterns: paths or globs, relative to `root`; or one folder of images.
        root: what they are relative to.
        separator: of the columns of a csv file; by default a comma, and a tab for `.tsv`.
        encoding: of csv, json and text files.

    Raises:
        UserError: no file matches, the format is unknown, `datasets` is missing, or a file is empty or damaged.
    """
    patterns = [patterns] if isinstance(patterns, str) else patterns
    paths = [path for pattern in patterns for path in _matches(option, root / Path(pattern).expanduser())]
    source = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    if any(path.is_dir() for path in paths):
        if len(paths) > 1:
            raise UserError(f"data.{option}={join_first(patterns)} must be one folder of images, or files")
        return Rows(source, _read_folder(paths[0]))
    formats = {FORMATS.get(path.suffix.lower(), "") for path in paths}
    if len(formats) > 1 or "" in formats:
        suffixes = join_first(sorted({path.suffix or path.name for path in paths}))
        raise UserError(f"data.{option} names files of the kinds {suffixes}; give one kind of {', '.join(FORMATS)}")
    table = _read_tables(formats.pop(), paths, source, separator, encoding)
    return Rows(source, table)


def _matches(option: str, pattern: Path) -> list[Path]:
    if pattern.exists():
        return [pattern]
    paths = [Path(path) for path in sorted(glob.glob(str(pattern), recursive=True))]
    if not paths:
        raise UserError(f"no file {pattern.absolute()}; set data.{option} to a path or glob, and data.root=…")
    return paths


def _read_tables(kind: str, paths: Sequence[Path], source: str, separator: str | None, encoding: str) -> Any:
    datasets = import_datasets()
    tab = all(path.suffix.lower() == ".tsv" for path in paths)
    options: dict[str, dict[str, Any]] = {
        # "NA" and "None" are words
        "csv": {
            "sep": separator or ("\t" if tab else ","),
            "encoding": encoding,
            "keep_default_na": False,
            "na_values": [""],
        },
        "json": {"encoding": encoding},
        "parquet": {},
        "text": {"encoding": encoding, "sample_by": "document"},
    }
    if empty := [path for path in paths if not path.stat().st_size]:
        raise UserError(f"{join_first(empty)} is empty; replace it with a valid file")
    read = getattr(datasets.Dataset, f"from_{kind}")
    with TemporaryDirectory() as cache:  # of the converted rows, which are then in memory
        try:
            escaped = [glob.escape(str(path.absolute())) for path in paths]
            table = read(escaped, cache_dir=cache, keep_in_memory=True, **options[kind])
        except Exception as error:  # `datasets` wraps those of many readers
            cause: BaseException = error
            while cause.__cause__ is not None:
                cause = cause.__cause__
            words = " ".join(str(cause).split())[:300] or type(cause).__name__
            if "no data" in words or "at least one example" in words:  # a header only
                raise UserError(f"{source} has no rows; replace it with a valid file") from error
            hint = "; set data.encoding=…" if isinstance(cause, UnicodeError | LookupError) else ""
            raise UserError(f"cannot read {source} as {kind}: {words}{hint}") from error
    if not len(table):
        raise UserError(f"{source} has no rows; replace it with a valid file")
    return table


def _read_folder(folder: Path) -> Any:
    """Return a table of the images in a folder: their files, and the names of the subfolders that are their classes.

    Hidden files and folders, which notebooks and file managers leave behind, are no images and no classes.
    """
    datasets = import_datasets()
    images = sorted(path.relative_to(folder) for path in folder.glob("*/**/*") if path.suffix.lower() in IMAGES)
    paths = [path for path in images if not any(part.startswith(".") for part in path.parts)]
    if not paths:
        raise UserError(f"{folder} has no images; it needs a folder for each class, with files {', '.join(IMAGES)}")
    return datasets.Dataset.from_dict(
        {
            "image": [{"path": str(folder / path), "bytes": None} for path in paths],
            "label": [path.parts[0] for path in paths],
        }
    )


def import_datasets() -> Any:
    """Return the package `datasets`, which shows and logs nothing.

    Raises:
        ImportError: it is missing.
    """
    try:
        import datasets  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError(f"data=files needs Hugging Face's datasets: {EXTRA} ({error})") from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises, too
    return datasets
