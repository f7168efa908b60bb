"""Partitions of the client-sampling studies: few large clients, and clients that hold a few classes only.

They need not use all samples. Each client gets its number of samples in equal parts from its classes.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sharding.errors import UserError
from train.data.dataset import Dataset, Partition, labels_of

Counts = NDArray[np.int64]


def power_law_sizes(num_samples: int, num_clients: int, rng: np.random.Generator, alpha: float) -> Counts:
    """Return sizes ∝ k^−α, at least 1 each, in random order: int64 (clients,), summing to `num_samples`."""
    weights = np.arange(1, num_clients + 1, dtype=np.float64) ** -alpha
    ends = np.round(np.cumsum(weights) / weights.sum() * (num_samples - num_clients)).astype(np.int64)
    return rng.permutation(1 + np.diff(ends, prepend=0))


def two_sizes(
    dataset: Dataset,
    num_clients: int,
    rng: np.random.Generator,
    *,
    share: float = 0.1,
    large: Sequence[int] = (90, 150),
    small: Sequence[int] = (9, 15),
    classes: int = 0,
) -> Partition:
    """Make the first `share` of the clients large and the others small.

    Models that share their clients thus have the same large clients. With the defaults a tenth of the clients has
    52.6 % of the data: Zhang et al. 2024 (multi-model federated learning), first experiment.

    Args:
        dataset: a dataset with classes.
        num_clients: number of shares.
        rng: source of randomness.
        share: the share of the clients that are large, rounded to whole clients.
        large: (least, most) samples of a large client, all numbers between alike.
        small: (least, most) samples of a small client.
        classes: the number of classes of a client; 0 mixes all.

    Raises:
        UserError: an invalid range or share, or too few samples.
    """
    labels = labels_of(dataset)
    if not 0 <= share <= 1:
        raise UserError(f"data.partition.share={share} must be in 0…1")
    _check_range("large", large)
    _check_range("small", small)
    if classes < 0:
        raise UserError(f"data.partition.classes={classes} must be at least 0, which mixes all")
    count = round(share * num_clients)
    drawn = [
        rng.integers(least, most + 1, number)
        for (least, most), number in ((large, count), (small, num_clients - count))
    ]
    sizes = np.concatenate(drawn)
    if classes:
        return limited(labels, sizes, np.full(num_clients, classes), rng)
    if sizes.sum() > len(labels):
        raise UserError(
            f"the clients would have {sizes.sum()} samples, but the data has {len(labels)}; make them smaller"
        )
    rows = rng.permutation(len(labels))[: sizes.sum()]
    return [np.sort(part) for part in np.split(rows, np.cumsum(sizes)[:-1])]


def power_law_classes(
    dataset: Dataset,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 1.0,
    samples: int = 0,
    classes: Sequence[int] = (1, 6),
) -> Partition:
    """Give the k-th largest client a size in proportion to k^−α, and each client a random number of classes.

    The number of classes does not depend on the size. Luo et al. 2024 (arXiv 2404.13804), Setups 1 and 3.

    Args:
        dataset: a dataset with classes.
        num_clients: number of shares.
        rng: source of randomness.
        alpha: exponent of the sizes.
        samples: the number of samples of all clients together; 0: all that there are.
        classes: (least, most) of a client, all numbers between alike.

    Raises:
        UserError: an invalid range, or too few samples.
    """
    total = samples or len(dataset.train)
    if not num_clients <= total <= len(dataset.train):
        raise UserError(f"data.partition.samples={samples} must be {num_clients} to {len(dataset.train)}")
    sizes = power_law_sizes(total, num_clients, rng, alpha)
    _check_range("classes", classes)
    kinds = rng.integers(classes[0], classes[1] + 1, len(sizes))
    return limited(labels_of(dataset), sizes, np.minimum(kinds, sizes), rng)


def limited(labels: np.ndarray, sizes: Counts, kinds: Counts, rng: np.random.Generator) -> Partition:
    """Give client c `sizes[c]` samples of `kinds[c]` classes, as equally many of each as can be.

    The classes are drawn at random among those with enough samples left; the client that needs most of a class chooses
    first.

    Raises:
        UserError: more classes than there are, or not enough samples of any.
    """
    pools = [rng.permutation(np.flatnonzero(labels == kind)) for kind in range(int(labels.max()) + 1)]
    if kinds.max() > len(pools):
        raise UserError(f"clients shall have {kinds.max()} classes, but the data has {len(pools)}")
    remaining = np.array([len(pool) for pool in pools])
    parts: dict[int, np.ndarray] = {}
    for client in np.argsort(-sizes / kinds, kind="stable").tolist():
        size, num_classes = int(sizes[client]), int(kinds[client])
        each = np.diff(np.arange(num_classes + 1) * size // num_classes)
        enough = np.flatnonzero(remaining >= each.max())
        if len(enough) < num_classes:
            raise UserError(
                f"the data has too few samples of each class for a client with {size} of {num_classes} classes; "
                "choose fewer clients, smaller ones, or more classes for each"
            )
        chosen = rng.choice(enough, num_classes, replace=False)
        rows = [
            pools[kind][remaining[kind] - number : remaining[kind]] for kind, number in zip(chosen, each, strict=True)
        ]
        remaining[chosen] -= each
        parts[client] = np.sort(np.concatenate(rows))
    return [parts[client] for client in range(len(sizes))]


def _check_range(name: str, bounds: Sequence[int]) -> None:
    if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1]:
        raise UserError(f"data.partition.{name}={list(bounds)} must be the least and the most, at least 1")
