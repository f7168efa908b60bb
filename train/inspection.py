"""Who has what: a look at a configuration's partition before anything is trained."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from train.config import Config
from train.data import Dataset
from train.experiment import deal, read_dataset
from train.partition import class_counts


def inspect_partition(config: Config, into: Path) -> list[str]:
    """Draw the partition of `config` into `into` (PNG) and return what is worth saying about it, line by line.

    Raises:
        UserError: the data is not there, or cannot be shared out as configured.
    """
    dataset = read_dataset(config)
    parts = deal(config, dataset)
    sizes = np.array([len(part) for part in parts])
    labels = _labels(dataset)
    counts = None if labels is None else class_counts(parts, labels, dataset.num_classes)
    into.parent.mkdir(parents=True, exist_ok=True)
    _draw(sizes, counts, f"{config.name}: {config.data.partition}").savefig(into, dpi=130)
    lines = [
        f"{len(parts)} clients share {sizes.sum():,} of {len(dataset.train):,} samples of {dataset.name}",
        f"samples a client: {sizes.min()} least, {int(np.median(sizes))} median, {sizes.max()} most",
    ]
    if counts is not None:
        present = (counts > 0).sum(axis=1)
        lines.append(f"classes a client: {present.min()} least, {int(np.median(present))} median, {present.max()} most")
    return lines


def _labels(dataset: Dataset) -> NDArray[np.int64] | None:
    """Return the class of each training sample; None for text, whose targets are sequences."""
    return dataset.train.targets.numpy() if dataset.train.targets.dim() == 1 else None


def _draw(sizes: NDArray[np.int64], counts: NDArray[np.int64] | None, title: str) -> Figure:
    """Return the picture: the clients' sizes, and below them each client's share of every class."""
    figure = Figure(figsize=(9, 3 if counts is None else 6), layout="constrained")
    panels = figure.subplots(1 if counts is None else 2, 1, sharex=True, squeeze=False)[:, 0]
    panels[0].bar(np.arange(len(sizes)), sizes, width=1.0, color="0.6")
    panels[0].set(ylabel="samples", title=title)
    if counts is not None:
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        image = panels[1].imshow(shares.T, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
        panels[1].set(ylabel="class")
        figure.colorbar(image, ax=panels[1], label="share of the client's samples")
    panels[-1].set(xlabel="client")
    return figure
