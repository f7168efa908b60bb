"""A user's own data in files: texts with classes, texts to continue, or images with classes.

The files are csv, json, parquet or text files with named columns, or folders with a folder of images for each class.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from sharding.errors import UserError, join_first
from train.data.dataset import EMPTY, Dataset, Partition, Split, hold_out, reading, standardize, unchanged
from train.data.images import decode, shape_of
from train.data.rows import Rows, read_rows
from train.data.tokens import IGNORED, Tokenizer


def load_files(
    *,
    train: str | tuple[str, ...] | None = None,
    test: str | tuple[str, ...] | None = None,
    root: str | Path | None = None,
    test_fraction: float | None = None,
    seed: int = 0,
    text: str = "text",
    image: str | None = None,
    label: str = "label",
    client: str | None = None,
    classes: tuple[str | int, ...] | None = None,
    task: Literal["sequence_classification", "causal_lm"] | None = None,
    tokenizer: str | None = None,
    max_length: int = 128,
    size: int | None = None,
    separator: str | None = None,
    encoding: str = "utf-8",
) -> Dataset:
    """Load your own files: csv, json, parquet or text, or a folder of images for each class.

    Args:
        train: paths or globs of the training files, or a folder of images. A federation's server may have none.
        test: the same for the test set.
        root: folder that the paths are relative to; by default the current one.
        test_fraction: share of the training samples, drawn at random, that are the test set instead.
        seed: decides which.
        text: column of the texts.
        image: column of encoded images, in place of texts.
        label: column of the classes, whole numbers or words.
        client: column that names each training sample's client; the program passes that of `partition=column`.
        classes: the classes in their order; by default those of the training files, sorted.
        task: give each text a class (default), or predict the next tokens of the texts, which needs no classes.
        tokenizer: folder or hub id of the tokenizer; the program passes the model's weights.
        max_length: tokens of a sample. Longer texts are cut to classify them, and go on in the next sample otherwise.
        size: height and width to which images are resized; by default they must have those of the first.
        separator: of the columns of csv files; by default a comma, and a tab in `.tsv` files.
        encoding: of csv, json and text files.

    Raises:
        UserError: an option, a file, a column or a value is missing or invalid.
    """
    if train is None and (test is None or client is not None):
        raise UserError("data=files needs data.train=…, paths or globs of its training files")
    if (test is None) == (test_fraction is None):
        raise UserError("data=files needs either data.test=… or data.test_fraction=0.2, a share of the training data")
    if test_fraction is not None and not 0 <= test_fraction < 1:
        raise UserError(f"data.test_fraction={test_fraction} must be in [0, 1)")
    root = Path(root or "")
    splits = {
        name: read_rows(name, paths, root, separator, encoding)
        for name, paths in (("train", train), ("test", test))
        if paths is not None
    }
    clients = None if client is None else _clients(splits["train"].names("partition.column", client))
    first = next(iter(splits.values()))
    if image is not None or first.is_folder:
        dataset = _images(splits, image or "image", label, classes, size)
    elif tokenizer is None:
        raise UserError("data=files needs data.tokenizer=…, a folder or hub id, to read texts; or data.image=…")
    elif task == "causal_lm":
        dataset = _blocks(splits, text, clients, Tokenizer(tokenizer, max_length))
    else:
        dataset = _texts(splits, text, label, classes, Tokenizer(tokenizer, max_length))
    if clients is not None and dataset.natural is None:
        dataset = replace(dataset, natural=clients)
    count = round((test_fraction or 0) * len(dataset.train))
    return (
        hold_out(dataset, max(count, 1), seed, f"data.test_fraction={test_fraction}, {count} samples,")
        if test_fraction
        else dataset
    )


def prepared_files(data: Split, num_classes: int, pad_token_id: int | None = None) -> Dataset:
    """Return the dataset of samples that `load_files` has read, without samples."""
    prepare = standardize if data.inputs.dtype == torch.uint8 else unchanged
    none = data.emptied()
    shape = tuple(data.inputs.shape[1:])
    return Dataset("files", none, none, num_classes, shape, prepare, ignore_index=IGNORED, pad_token_id=pad_token_id)


def _clients(names: Sequence[Hashable]) -> Partition:
    """Return the indices of each client's rows; the clients are sorted by name."""
    kinds, owners = np.unique(np.asarray(names), return_inverse=True)
    return np.split(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners, minlength=len(kinds)))[:-1])


def _texts(
    splits: dict[str, Rows], text: str, label: str, classes: tuple[str | int, ...] | None, tokenizer: Tokenizer
) -> Dataset:
    """Return padded texts with classes."""
    targets, names = _classes(splits, label, classes)
    parts = {name: Split(tokenizer.padded(rows.texts(text)), targets[name]) for name, rows in splits.items()}
    shape = (tokenizer.max_length,)
    return _dataset(parts, len(names), shape, class_names=names, pad_token_id=tokenizer.pad_token_id)


def _blocks(splits: dict[str, Rows], text: str, clients: Partition | None, tokenizer: Tokenizer) -> Dataset:
    """Return packed texts with the tokens that follow; a block has one client's texts only."""
    parts, natural = {}, None
    for name, rows in splits.items():
        owners = clients if name == "train" else None
        everybody = [np.arange(len(rows))]
        parts[name], blocks = tokenizer.packed(rows.texts(text), everybody if owners is None else owners)
        natural = natural if owners is None else blocks
    shape = (tokenizer.max_length,)
    facts: dict[str, Any] = {"natural": natural, "ignore_index": IGNORED, "pad_token_id": tokenizer.pad_token_id}
    return _dataset(parts, len(tokenizer), shape, **facts)


def _images(
    splits: dict[str, Rows], image: str, label: str, classes: tuple[str | int, ...] | None, size: int | None
) -> Dataset:
    """Return images of one size with classes: gray if all of them are, else in color."""
    targets, names = _classes(splits, label, classes)
    files = {name: rows.files(image) for name, rows in splits.items()}
    first = next(iter(splits))
    with reading(Path(splits[first].source)):
        _, height, width = shape_of(files[first][0])
    channels = 1
    for name, rows in splits.items():
        with reading(Path(rows.source)):
            channels = max(channels, *(shape_of(file)[0] for file in files[name]))  # a color image may follow gray ones
    shape = (channels, height, width) if size is None else (channels, size, size)
    parts = {}
    for name, rows in splits.items():
        with reading(Path(rows.source)):
            parts[name] = Split(decode(files[name], shape, resize=size is not None), targets[name])
    return _dataset(parts, len(names), shape, class_names=names, prepare=standardize)


def _dataset(parts: dict[str, Split], num_classes: int, shape: tuple[int, ...], **facts: Any) -> Dataset:
    """Return a dataset of these splits; one that is not there is empty."""
    present = next(iter(parts.values()))
    train, test = (parts.get(name, present.emptied()) for name in ("train", "test"))
    return replace(Dataset("files", EMPTY, EMPTY, num_classes, shape), train=train, test=test, **facts)


def _classes(
    splits: dict[str, Rows], label: str, classes: tuple[str | int, ...] | None
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Return the class of each row as its index in the classes, int64 (rows,), and the classes' names.

    Raises:
        UserError: a row has none of the classes, or a class is named twice.
    """
    if repeated := [name for name, count in Counter(map(str, classes or ())).items() if count > 1]:
        raise UserError(f"data.classes names {join_first(repeated)} more than once; name each class once")
    values = {name: rows.names("label", label) for name, rows in splits.items()}
    first = next(iter(splits))
    known: Sequence[Any] = classes or splits[first].class_names(label) or sorted(set(values[first]))
    names = tuple(str(name) for name in known)
    index = {name: number for number, name in enumerate(names)}
    of = "data.classes" if classes else "the training files"
    for name, rows in splits.items():
        if unknown := sorted({str(value) for value in values[name]} - index.keys()):
            raise UserError(
                f"{rows.source} has the classes {join_first(unknown)}, which {of} lack; they have {join_first(names)}"
            )
    return {
        name: torch.tensor([index[str(value)] for value in column], dtype=torch.int64)
        for name, column in values.items()
    }, names
