"""A user's own data in files: texts with classes, texts to continue, or images with classes.

The files are csv, json, parquet or text files with named columns, or folders with a folder of images for each class.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from models.hub import read_config, reads_last
from sharding.errors import UserError, join_first
from train.data.dataset import EMPTY, Dataset, Partition, Split, hold_out, reading, standardize
from train.data.images import Shape, decode, shape_of
from train.data.rows import Rows, find_files, ordered, read_rows
from train.data.tokens import IGNORED, Tokenizer

log = logging.getLogger(__name__)


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
    weights: str | None = None,
    max_length: int = 128,
    size: int | None = None,
    shape: Shape | None = None,
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
        label: column of the classes, which are text: `007` is not `7`.
        client: column that names each training sample's client; the program passes that of `partition=column`.
        classes: the classes in their order; by default that of the model's `id2label` if it names the same ones, else
            they are sorted.
        task: give each text a class (default), or predict the next tokens of the texts, which needs no classes.
        tokenizer: folder or hub id of the tokenizer; the program passes the model's weights.
        weights: folder or hub id of the model that reads the texts; the program passes the model's.
        max_length: tokens of a sample. Longer texts are cut to classify them, and go on in the next sample otherwise.
        size: height and width to which images are resized; by default they must have those of the first.
        shape: channels, height and width of all images; by default those of the files. A federation's server passes its
            own to the nodes.
        separator: the separator of the columns of csv files; by default a comma, and a tab in `.tsv` files.
        encoding: the encoding of csv, json and text files.

    Raises:
        UserError: an option, a file, a column or a value is missing or invalid.
    """
    if train is None and (test is None or client is not None):
        raise UserError("data=files needs data.train=…, paths or globs of its training files")
    if test is not None and test_fraction:
        raise UserError("data.test=… and data.test_fraction=… are both set; set one of them to null")
    if test is None and test_fraction is None:
        raise UserError("data=files needs either data.test=… or data.test_fraction=0.2, a share of the training data")
    if test_fraction is not None and not 0 <= test_fraction < 1:
        raise UserError(f"data.test_fraction={test_fraction} must be in [0, 1)")
    root = Path(root or "")
    paths = {
        name: find_files(name, patterns, root)
        for name, patterns in (("train", train), ("test", test))
        if patterns is not None
    }
    has_images = image is not None or any(path.is_dir() for found in paths.values() for path in found)
    if not has_images and tokenizer is None:
        raise UserError("data=files needs data.tokenizer=…, a folder or hub id, to read texts; or data.image=…")
    columns = {"image": image or "image"} if has_images else {"text": text}
    if has_images or task != "causal_lm":
        columns = {"label": label} | columns
    owner = {} if client is None else {"partition.column": client}
    splits = {
        name: read_rows(name, found, columns | (owner if name == "train" else {}), separator, encoding)
        for name, found in paths.items()
    }
    clients, client_names = (None, ()) if client is None else _clients(splits["train"].names(client))
    if has_images:
        dataset = _images(splits, columns["image"], root, label, classes, size, shape)
    else:
        assert tokenizer is not None  # checked above
        config = None if weights is None else read_config(weights)
        num_ids = None if config is None else getattr(config.get_text_config(), "vocab_size", None)
        reader = Tokenizer(tokenizer, max_length, num_ids, None if config is None else reads_last(config))
        if task == "causal_lm":
            dataset = _blocks(splits, text, clients, reader)
        else:
            labels = () if config is None else tuple(str(name) for _, name in sorted(config.id2label.items()))
            dataset = _texts(splits, text, label, classes, reader, labels)
    if clients is not None:
        natural = clients if dataset.natural is None else dataset.natural
        dataset = replace(dataset, natural=natural, client_names=client_names)
    if not test_fraction:
        return dataset
    count = max(round(test_fraction * len(dataset.train)), 1)
    return hold_out(dataset, count, seed, f"data.test_fraction={test_fraction}, {count} samples,")


def _clients(names: Sequence[str]) -> tuple[Partition, tuple[str, ...]]:
    """Return the indices of each client's rows, and the clients' names, sorted."""
    kinds = ordered(names)
    number = {name: client for client, name in enumerate(kinds)}
    owners = np.array([number[name] for name in names])
    return np.split(np.argsort(owners, kind="stable"), np.cumsum(np.bincount(owners))[:-1]), tuple(kinds)


def _texts(
    splits: dict[str, Rows],
    text: str,
    label: str,
    classes: tuple[str | int, ...] | None,
    tokenizer: Tokenizer,
    labels: Sequence[str],
) -> Dataset:
    """Return padded texts with classes, in the order of the model's labels if it has the same."""
    targets, names = _classes(splits, label, classes, labels)
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
    splits: dict[str, Rows],
    image: str,
    root: Path,
    label: str,
    classes: tuple[str | int, ...] | None,
    size: int | None,
    shape: Shape | None,
) -> Dataset:
    """Return images of one size with classes: gray if all of them are, else in color."""
    targets, names = _classes(splits, label, classes)
    read = {name: rows.images(image, root) for name, rows in splits.items()}
    given, channels = shape, 1
    for files, place in read.values():
        for row, file in enumerate(files):
            with reading(place(row)):
                found = shape_of(file)
            shape, channels = shape or found, max(channels, found[0])  # a color image may follow gray ones
            if size is None and found[1:] != shape[1:]:
                raise UserError(
                    "{} has {}x{} pixels, not {}x{}; set data.size=… to resize all images".format(
                        place(row), *found[:0:-1], *shape[:0:-1]
                    )
                )
    assert shape is not None  # there are images
    shape = (channels if given is None else given[0], *(shape[1:] if size is None else (size, size)))
    parts = {
        name: Split(decode(files, shape, size is not None, place), targets[name])
        for name, (files, place) in read.items()
    }
    return _dataset(parts, len(names), shape, class_names=names, prepare=standardize)


def _dataset(parts: dict[str, Split], num_classes: int, shape: tuple[int, ...], **facts: Any) -> Dataset:
    """Return a dataset of these splits; one that is not there is empty."""
    present = next(iter(parts.values()))
    train, test = (parts.get(name, present.emptied()) for name in ("train", "test"))
    return replace(Dataset("files", EMPTY, EMPTY, num_classes, shape), train=train, test=test, **facts)


def _classes(
    splits: dict[str, Rows], label: str, classes: tuple[str | int, ...] | None, labels: Sequence[str] = ()
) -> tuple[dict[str, torch.Tensor], tuple[str, ...]]:
    """Return the class of each row as its index in the classes, int64 (rows,), and the classes' names.

    The order is that of `classes`, else of the model's `labels` with these names, of the files' metadata, or sorted.

    Raises:
        UserError: a row has none of the classes, a class is named twice, or `classes` has another order than `labels`.
    """
    if classes == ():
        raise UserError("data.classes is empty; name the classes, or leave it out")
    if repeated := [name for name, count in Counter(map(str, classes or ())).items() if count > 1]:
        raise UserError(f"data.classes names {join_first(repeated)} more than once; name each class once")
    values = {name: rows.names(label) for name, rows in splits.items()}
    first = next(iter(splits))
    names = tuple(map(str, classes or splits[first].classes.get(label) or ordered(values[first])))
    place = {name.casefold(): number for number, name in enumerate(labels)}
    if len(place) == len(names) == len(labels) and place.keys() == {name.casefold() for name in names}:
        of_model = tuple(sorted(names, key=lambda name: place[name.casefold()]))
        if classes and names != of_model:
            raise UserError(
                f"data.classes=[{join_first(names)}] is not the order of the weights' own classes; leave it out, or "
                f"set data.classes=[{', '.join(of_model)}]"
            )
        names = of_model
    if len(names) == 1:
        log.warning("all samples have the class %s: there is nothing to learn", names[0])
    index = {name: number for number, name in enumerate(names)}
    of = "data.classes" if classes else "the training files"
    for name, rows in splits.items():
        if unknown := ordered(set(values[name]) - index.keys()):
            raise UserError(
                f"{rows.source} has the classes {join_first(unknown)}, which {of} lack; they have {join_first(names)}"
            )
    return {
        name: torch.tensor([index[value] for value in column], dtype=torch.int64) for name, column in values.items()
    }, names
