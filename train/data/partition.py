"""Partitions: disjoint, reproducible shares of the training samples, one per client.

A partition has one ascending int64 index array per client. All schemes but `natural`, `column`
and those of `train.data.quantity_skew` use every sample once, and all but these and `power_law` give equal sizes, up to
one sample when the division leaves a remainder.

The non-IID schemes draw a distribution over classes for each client and then samples of those classes until the client
is full. Samples are drawn without replacement, so a class can run out; the client's distribution is then restricted to
the other classes.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from sharding.errors import UserError, safe_repr
from train.data.dataset import Dataset, Partition, labels_of
from train.data.quantity_skew import power_law_classes, power_law_sizes, two_sizes

__all__ = ["PARTITIONS", "Partition", "class_counts", "partition"]


def partition(scheme: str, dataset: Dataset, num_clients: int, rng: np.random.Generator, **options: Any) -> Partition:
    """Partition the training samples of a dataset among clients.

    Args:
        scheme: a key of `PARTITIONS`.
        dataset: the dataset whose training samples are partitioned.
        num_clients: number of shares.
        rng: decides everything random.
        options: keyword arguments of the scheme's function.

    Raises:
        UserError: an option that this dataset does not allow, or more clients than it has samples (or natural clients).
    """
    if not len(dataset.train):
        raise UserError(f"{dataset.name} has no training samples to divide; name their files or folder")
    if not 1 <= num_clients <= len(dataset.train):
        raise UserError(f"clients.count={num_clients} must be 1 to {len(dataset.train)}, the samples of {dataset.name}")
    parts = [_indices(scheme, part) for part in PARTITIONS[scheme](dataset, num_clients, rng, **options)]
    if len(parts) != num_clients:
        raise UserError(f"the partition {scheme} returns {len(parts)} clients, and clients.count is {num_clients}")
    rows = np.concatenate(parts)
    if rows.size and not 0 <= rows.min() <= rows.max() < len(dataset.train):
        worst = rows.min() if rows.min() < 0 else rows.max()
        raise UserError(
            f"the partition {scheme} gives a client sample {worst}; there are 0 to {len(dataset.train) - 1}"
        )
    return parts


def _indices(scheme: str, part: Any) -> np.ndarray:
    """Return a client's samples as a partition gives them, which may be your own."""
    indices = np.asarray(part)
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise UserError(f"the partition {scheme} gives a client {safe_repr(part)}; an array of indices is needed")
    return indices.astype(np.int64)


def iid(dataset: Dataset, num_clients: int, rng: np.random.Generator) -> Partition:
    """Shuffle, then cut into equal parts."""
    num_samples = len(dataset.train)
    owners = np.repeat(np.arange(num_clients), _equal_sizes(num_samples, num_clients))
    return _collect(rng.permutation(num_samples), owners, num_clients)


def dirichlet(dataset: Dataset, num_clients: int, rng: np.random.Generator, *, alpha: float = 1.0) -> Partition:
    """Draw each client's distribution over classes from Dir(αp), where p are the classes' shares of the data.

    α → ∞ gives every client the shares of the whole, α → 0 a single class as long as there are enough
    samples. Hsu, Qi & Brown, "Measuring the Effects of Non-Identical Data Distribution", 2019, Section 3.1.
    """
    _check_positive(alpha=alpha)
    labels = labels_of(dataset)
    remaining = np.bincount(labels)
    counts = np.zeros((num_clients, len(remaining)), dtype=np.int64)
    prior = alpha * remaining / remaining.sum()
    for client, size in enumerate(_equal_sizes(len(labels), num_clients)):
        counts[client] = _draw(_log_dirichlet(prior, rng), remaining, size, rng)
        remaining -= counts[client]
    return _assign_samples(labels, counts, rng)


def pachinko(
    dataset: Dataset,
    num_clients: int,
    rng: np.random.Generator,
    *,
    alpha: float = 1.0,
    fine_alpha: float = 10.0,
    concentration: Literal["total", "per_class"] = "total",
) -> Partition:
    """Draw each client's distribution over superclasses, then over the classes of each superclass.

    A client thus prefers classes that look alike. Pachinko allocation: Reddi et al., "Adaptive Federated
    Optimization", ICLR 2021, Appendix C.1 and its Algorithm 3. They draw from symmetric Dirichlet distributions,
    with one parameter per class. Korzhenkov & Louizos (Section 4.1) write Dir(αp), p the shares of the data, so that α
    is the total: Dir(αp) over superclasses, then Dir(α′p′) with the shares p′ within the superclass, the default.
    On CIFAR-100, α = 1 and α′ = 10 leave a client about 7 effective classes so, and 43 with one parameter per class.

    Args:
        dataset: a dataset with superclasses.
        num_clients: number of shares.
        rng: source of randomness.
        alpha: α, of the distribution over superclasses.
        fine_alpha: α′, of the distributions over the classes of a superclass.
        concentration: whether α and α′ are the sum of the Dirichlet parameters (``total``) or each of them
            (``per_class``).

    Raises:
        UserError: the dataset has no superclasses.
    """
    _check_positive(alpha=alpha, fine_alpha=fine_alpha)
    per_class = concentration == "per_class"
    if (coarse := dataset.coarse) is None:
        raise UserError(f"pachinko needs superclasses, which cifar100 has and {dataset.name} has not; try dirichlet")
    labels = labels_of(dataset)
    remaining = np.bincount(labels, minlength=len(coarse))
    members = [np.flatnonzero(coarse == superclass) for superclass in range(coarse.max() + 1)]
    outer = _parameters(np.array([remaining[fine].sum() for fine in members]), alpha, per_class)
    inner = [_parameters(remaining[fine], fine_alpha, per_class) for fine in members]
    counts = np.zeros((num_clients, len(remaining)), dtype=np.int64)
    for client, size in enumerate(_equal_sizes(len(labels), num_clients)):
        totals = np.array([remaining[fine].sum() for fine in members])
        drawn = _draw(_log_dirichlet(outer, rng), totals, size, rng)
        for superclass in np.flatnonzero(drawn):
            fine = members[superclass]
            log_weights = _log_dirichlet(inner[superclass], rng)
            counts[client, fine] = _draw(log_weights, remaining[fine], drawn[superclass], rng)
        remaining -= counts[client]
    return _assign_samples(labels, counts, rng)


def natural(dataset: Dataset, num_clients: int, rng: np.random.Generator) -> Partition:
    """Use the clients of the data; if fewer are needed, choose at random.

    Raise a UserError if the data has fewer clients, or none.
    """
    if (clients := dataset.natural) is None:
        raise UserError(
            f"natural needs data with clients, such as shakespeare or synthetic; {dataset.name} has none: try iid"
        )
    if num_clients > len(clients):
        raise UserError(f"clients.count={num_clients} is more than the {len(clients)} natural clients of the data")
    return [clients[client] for client in choose_clients(len(clients), num_clients, rng)]


def choose_clients(available: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return which of the clients of the data take part, ascending."""
    return np.sort(rng.choice(available, count, replace=False))


def client_names(scheme: str, dataset: Dataset, num_clients: int, rng: np.random.Generator) -> list[str]:
    """Return each client's name in the data, for the same arguments as `partition`; an empty list without names."""
    names = dataset.client_names if scheme in ("column", "natural") else ()
    return [names[client] for client in choose_clients(len(names), num_clients, rng)] if names else []


def by_column(dataset: Dataset, num_clients: int, rng: np.random.Generator, *, column: str) -> Partition:
    """Make each value in a column of `files` a client; if fewer are needed, choose at random.

    The program passes the column to the dataset, which groups its samples while it reads them.

    Raises:
        UserError: there are fewer values, or the samples are not from files.
    """
    if (clients := dataset.natural) is None:
        raise UserError(f"{dataset.name} has no samples of clients in a column {safe_repr(column)}; try iid")
    if num_clients > len(clients):
        raise UserError(f"clients.count={num_clients} is more than the {len(clients)} values in the column {column}")
    return natural(dataset, num_clients, rng)


def power_law(dataset: Dataset, num_clients: int, rng: np.random.Generator, *, alpha: float = 1.0) -> Partition:
    """Give the k-th largest client a size in proportion to k^−α, at least one sample; classes are mixed.

    Which client is large is random.
    """
    num_samples = len(dataset.train)
    owners = np.repeat(np.arange(num_clients), power_law_sizes(num_samples, num_clients, rng, alpha))
    return _collect(rng.permutation(num_samples), owners, num_clients)


def shards(dataset: Dataset, num_clients: int, rng: np.random.Generator) -> Partition:
    """Sort by class, cut into two pieces for each client, and assign the pieces at random.

    So most clients have samples of two classes only. McMahan et al. 2017, "Communication-Efficient Learning of Deep
    Networks from Decentralized Data", Section 3.
    """
    labels = labels_of(dataset)
    sizes = _equal_sizes(len(labels), num_clients)
    lengths = np.stack([sizes // 2, (sizes + 1) // 2], axis=1)
    assigned = rng.permutation(lengths.size)
    owners = np.repeat(assigned // 2, lengths.ravel()[assigned])
    return _collect(_sorted_by_class(labels, rng), owners, num_clients)


def class_counts(parts: Sequence[np.ndarray], labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the number of samples of each class at each client, int64 (clients, classes).

    `parts` has the indices of each client's samples, `labels` the integer classes of all, (samples,). Labels that are
    not classes, such as those that the loss ignores, are not counted.
    """
    owners, classes = np.repeat(np.arange(len(parts)), [len(part) for part in parts]), labels[np.concatenate(parts)]
    pairs = (owners * num_classes + classes)[(classes >= 0) & (classes < num_classes)]
    return np.bincount(pairs, minlength=len(parts) * num_classes).reshape(len(parts), num_classes)


def _check_positive(**numbers: float) -> None:
    for option, value in numbers.items():
        if value <= 0:
            raise UserError(f"{option}={value} of the partition must be above 0")


def _parameters(sizes: np.ndarray, alpha: float, per_class: bool) -> np.ndarray:
    """Return the parameters of a Dirichlet distribution over classes of these sizes: α each, or α in all."""
    return np.full(len(sizes), alpha) if per_class else alpha * sizes / max(sizes.sum(), 1)


def _log_dirichlet(parameters: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw the logarithm of Dirichlet weights, up to a constant.

    Weights are independent Gamma(a) draws over their sum. For small a such draws underflow to zero all at
    once, so we use Gamma(a) = Gamma(a + 1)·U^{1/a} (Marsaglia & Tsang 2000, Section 6), whose logarithm is
    always finite.
    """
    a = np.maximum(parameters, 1e-300)  # 1/a must be finite
    return np.log(rng.standard_gamma(a + 1)) - rng.standard_exponential(len(a)) / a


def _draw(log_weights: np.ndarray, capacity: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Count draws of classes in proportion to weights, one by one, without the classes that have run out.

    Instead of one by one, all that is missing is drawn at once; what exceeds a class's capacity is drawn
    again from the classes that still have some. Independent draws that get rejected change nothing for the
    others, so the distribution is the same, and as each repetition exhausts a class there are at most as many as there
    are classes.

    Args:
        log_weights: (classes,) finite.
        capacity: (classes,) samples remaining, at least `total` altogether.
        total: number of draws.
        rng: source of randomness.

    Returns:
        int64 (classes,), summing to `total`.
    """
    counts = np.zeros_like(capacity)
    while (missing := total - counts.sum()) > 0:
        open_classes = counts < capacity
        log_open = np.where(open_classes, log_weights, -np.inf)
        weights = np.exp(log_open - log_open.max())
        counts = np.minimum(counts + rng.multinomial(missing, weights / weights.sum()), capacity)
    return counts


def _assign_samples(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> Partition:
    """Give each client random samples of each class, as many as `counts` (clients, classes) says.

    Each column of `counts` sums to the size of its class.
    """
    num_clients, num_classes = counts.shape
    assert np.array_equal(counts.sum(axis=0), np.bincount(labels, minlength=num_classes))
    owners = np.repeat(np.tile(np.arange(num_clients), num_classes), counts.T.ravel())
    return _collect(_sorted_by_class(labels, rng), owners, num_clients)


def _collect(order: np.ndarray, owners: np.ndarray, num_clients: int) -> Partition:
    """Group the samples `order` by their `owners`, ascending within each client."""
    sizes = np.bincount(owners, minlength=num_clients)
    return np.split(order[np.lexsort((order, owners))], np.cumsum(sizes)[:-1])


def _sorted_by_class(labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return all indices, class after class, in random order within a class."""
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def _equal_sizes(num_samples: int, num_clients: int) -> np.ndarray:
    """Return sizes that sum to `num_samples` and differ by at most one."""
    return np.diff(np.arange(num_clients + 1) * num_samples // num_clients)


# (dataset, number of clients, randomness, and options) -> the partition
PARTITIONS: dict[str, Callable[..., Partition]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "pachinko": pachinko,
    "natural": natural,
    "column": by_column,
    "power_law": power_law,
    "power_law_classes": power_law_classes,
    "two_sizes": two_sizes,
    "shards": shards,
}
