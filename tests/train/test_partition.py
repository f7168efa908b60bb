"""Partitions: exact distributions where they can be enumerated, invariants by property tests, and bad input."""

from collections.abc import Callable
from itertools import product
from math import factorial, prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding import UserError
from train.data import Dataset, Split
from train.data.dataset import unchanged
from train.data.partition import PARTITIONS, _draw, class_counts, partition


def dataset(labels: np.ndarray, num_classes: int = 10, **attributes: object) -> Dataset:
    split = Split(torch.zeros(len(labels), 1), torch.from_numpy(labels))
    return Dataset("toy", split, split, num_classes, (1,), unchanged, **attributes)


def balanced(num_samples: int, num_classes: int = 10) -> Dataset:
    coarse = np.arange(num_classes) // 2
    halves = list(np.array_split(np.arange(num_samples), 2))
    return dataset(np.arange(num_samples) % num_classes, num_classes, coarse=coarse, natural=halves)


def counts_of(data: Dataset, parts: list[np.ndarray]) -> np.ndarray:
    return class_counts(parts, data.train.targets.numpy(), data.num_classes)


SPLITTING = sorted(set(PARTITIONS) - {"natural", "column", "two_sizes", "power_law_classes"})


@settings(max_examples=60)
@given(
    scheme=st.sampled_from(SPLITTING),
    labels=st.lists(st.integers(0, 9), min_size=1, max_size=80),
    share=st.floats(0.01, 1.0),
    alpha=st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 1e3, 1e12]),
    seed=st.integers(0, 2**32 - 1),
)
def test_partition_gives_each_sample_to_one_client(scheme, labels, share, alpha, seed) -> None:
    data = dataset(np.array(labels), coarse=np.arange(10) // 2)
    num_clients = max(1, int(share * len(labels)))
    options = {"alpha": alpha} if scheme in ("dirichlet", "pachinko", "power_law") else {}
    parts = partition(scheme, data, num_clients, np.random.default_rng(seed), **options)
    again = partition(scheme, data, num_clients, np.random.default_rng(seed), **options)
    assert len(parts) == num_clients
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    sizes = [len(part) for part in parts]
    assert min(sizes) >= 1
    assert scheme == "power_law" or max(sizes) - min(sizes) <= 1
    assert all(np.array_equal(part, other) for part, other in zip(parts, again, strict=True))


@pytest.mark.parametrize("scheme", PARTITIONS)
def test_partition_with_another_seed_differs(scheme: str) -> None:
    data, clients = balanced(1000), 1 if scheme in ("natural", "column") else 20
    options = {"power_law_classes": {"samples": 200}, "column": {"column": "author"}}.get(scheme, {})
    drawn = [partition(scheme, data, clients, np.random.default_rng(seed), **options) for seed in range(20)]
    drawn = {np.concatenate(parts).tobytes() for parts in drawn}
    assert len(drawn) == (2 if scheme in ("natural", "column") else 20)


@pytest.mark.parametrize("scheme", ["dirichlet", "pachinko"])
def test_partition_with_a_tiny_alpha_has_one_class_per_client(scheme: str) -> None:
    data = balanced(10_000)
    counts = counts_of(data, partition(scheme, data, 100, np.random.default_rng(0), alpha=1e-3))
    groups = counts if scheme == "dirichlet" else counts.reshape(100, 5, 2).sum(2)
    largest = groups.max(axis=1) / counts.sum(axis=1)
    assert (largest == 1).mean() > 0.75  # the others are the few who came when their class had run out
    assert largest.mean() > 0.9


def test_dirichlet_with_a_large_alpha_has_the_overall_shares() -> None:
    labels = np.repeat(np.arange(3), [1000, 3000, 6000])
    data = dataset(labels, 3)
    counts = counts_of(data, partition("dirichlet", data, 10, np.random.default_rng(0), alpha=1e9))
    expected = np.array([100, 300, 600])
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_dirichlet_shares_have_the_theoretical_variance() -> None:
    """Over many small clients of a large pool, the classes' shares have variance p(1 − p)(1 + α/m)/(α + 1).

    That is the Dirichlet-multinomial distribution; α multiplies p, so one α means the same for any number of classes.
    """
    alpha, size, clients = 2.0, 10, 4000
    data = balanced(10 * size * clients, 4)
    parts = partition("dirichlet", data, 10 * clients, np.random.default_rng(0), alpha=alpha)[:clients]
    shares = counts_of(data, parts) / size
    expected = 0.25 * 0.75 * (1 + alpha / size) / (1 + alpha)
    assert shares.var(axis=0) == pytest.approx(expected, rel=0.08)
    assert shares.mean(axis=0) == pytest.approx(0.25, abs=0.02)


def test_pachinko_groups_classes_of_a_superclass() -> None:
    """Within a superclass α = 10 each spreads evenly, so sisters occur together, classes of others do not."""
    data = balanced(100_000)
    options = {"alpha": 0.1, "fine_alpha": 10.0, "concentration": "per_class"}
    counts = counts_of(data, partition("pachinko", data, 1000, np.random.default_rng(0), **options))[:500]
    related = np.corrcoef(counts.T)
    sisters = related[np.arange(10), np.arange(10) ^ 1]
    strangers = related[np.arange(10), (np.arange(10) + 2) % 10]
    assert sisters.min() > 0.7
    assert strangers.max() < 0.1


def effective(counts: np.ndarray) -> float:
    """Mean over clients of 1/Σq², q the shares of the classes."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    return float(np.mean(1 / np.square(shares).sum(axis=1)))


@pytest.mark.parametrize(
    ("options", "classes", "superclasses"),
    [
        ({}, (6.3, 8.3), (1.8, 2.4)),
        ({"concentration": "per_class"}, (40, 47), (9.3, 11)),
        ({"alpha": 0.1, "concentration": "per_class"}, (11, 15), (2.5, 3.4)),
    ],
    ids=["totals, as the spectral paper writes", "per class", "per class, Reddi et al.'s usual value"],
)
def test_pachinko_of_cifar100_has_the_documented_concentration(options, classes, superclasses) -> None:
    """As many samples, clients and classes as CIFAR-100 has; the bounds hold for two seeds of another computation."""
    labels, coarse = np.arange(50_000) % 100, np.arange(100) % 20
    data = dataset(labels, 100, coarse=coarse)
    counts = counts_of(data, partition("pachinko", data, 100, np.random.default_rng(0), **options))
    above = np.stack([counts[:, coarse == superclass].sum(axis=1) for superclass in range(20)], axis=1)
    assert classes[0] < effective(counts) < classes[1]
    assert superclasses[0] < effective(above) < superclasses[1]


def test_pachinko_with_one_superclass_is_dirichlet() -> None:
    """With a single superclass the coarse stage decides nothing, and Dir(α′p′) is left, here of uneven classes."""
    labels = np.repeat(np.arange(4), [12_000, 24_000, 36_000, 48_000])
    data = dataset(labels, 4, coarse=np.zeros(4, dtype=int))
    parts = partition("pachinko", data, 12_000, np.random.default_rng(0), alpha=1.0, fine_alpha=2.0)[:4000]
    shares = counts_of(data, parts) / 10
    mean = np.array([0.1, 0.2, 0.3, 0.4])
    assert shares.mean(axis=0) == pytest.approx(mean, abs=0.03)
    assert shares.var(axis=0) == pytest.approx(mean * (1 - mean) * (1 + 2 / 10) / 3, rel=0.12)


class ScriptedGenerator:
    """Stands in for a random generator: returns prescribed counts and multiplies their probabilities."""

    def __init__(self, script: list[tuple[int, ...]]) -> None:
        self.script, self.used, self.probability, self.options = script, 0, 1.0, []

    def multinomial(self, total: int, weights: np.ndarray) -> np.ndarray:
        outcomes = [c for c in product(range(total + 1), repeat=len(weights)) if sum(c) == total]
        if self.used == len(self.script):
            self.options = outcomes
            raise StopIteration
        counts = self.script[self.used]
        self.used += 1
        ways = factorial(total) / prod(map(factorial, counts))
        self.probability *= ways * prod(w**c for w, c in zip(weights.tolist(), counts, strict=True))
        return np.array(counts)


def distribution_of_draw(weights: np.ndarray, capacity: tuple[int, ...], total: int) -> dict[tuple[int, ...], float]:
    """Run `_draw` through every possible course of its random draws."""
    distribution: dict[tuple[int, ...], float] = {}
    scripts: list[list[tuple[int, ...]]] = [[]]
    while scripts:
        generator = ScriptedGenerator(scripts.pop())
        try:
            counts = _draw(np.log(weights), np.array(capacity), total, generator)
        except StopIteration:
            if generator.probability > 0:
                scripts += [[*generator.script, outcome] for outcome in generator.options]
        else:
            key = tuple(counts.tolist())
            distribution[key] = distribution.get(key, 0.0) + generator.probability
    return distribution


def distribution_one_by_one(weights: np.ndarray, capacity: tuple[int, ...], total: int) -> dict[tuple[int, ...], float]:
    """Hsu et al.: draw a class, take one of its samples; restrict the distribution to classes that have some left."""
    distribution = {(0,) * len(weights): 1.0}
    for _ in range(total):
        following: dict[tuple[int, ...], float] = {}
        for counts, probability in distribution.items():
            left = np.array([weight * (n < most) for weight, n, most in zip(weights, counts, capacity, strict=True)])
            for chosen in np.flatnonzero(left):
                key = tuple(n + (index == chosen) for index, n in enumerate(counts))
                following[key] = following.get(key, 0.0) + probability * left[chosen] / left.sum()
        distribution = following
    return distribution


@pytest.mark.parametrize("capacity", [(1, 1, 4), (2, 2, 1), (0, 2, 3), (4, 4, 4), (1, 3, 0)])
def test_draw_at_once_has_the_distribution_of_draws_one_by_one(capacity: tuple[int, ...]) -> None:
    weights = np.array([0.5, 0.3, 0.2])
    expected = distribution_one_by_one(weights, capacity, 4)
    actual = distribution_of_draw(weights, capacity, 4)
    assert sum(actual.values()) == pytest.approx(1, abs=1e-12)
    assert {key: p for key, p in actual.items() if p > 0} == pytest.approx(expected, abs=1e-12)


def test_partition_assigns_samples_of_a_class_at_random() -> None:
    """No client gets the first of a class more often than another."""
    data = dataset(np.zeros(4, dtype=np.int64), 1)
    for scheme in ("iid", "dirichlet", "shards", "power_law"):
        rng = np.random.default_rng(0)
        owners = [int(0 in partition(scheme, data, 2, rng)[0]) for _ in range(400)]
        assert 150 < sum(owners) < 250, scheme


def test_shards_partition_gives_each_client_two_class_runs() -> None:
    data = balanced(1000)
    parts = partition("shards", data, 50, np.random.default_rng(0))
    counts = counts_of(data, parts)
    assert ((counts > 0).sum(axis=1) <= 2).all()
    assert set(np.unique(counts)) == {0, 10, 20}


def test_power_law_partition_has_the_sizes() -> None:
    data = balanced(10_000)
    parts = partition("power_law", data, 100, np.random.default_rng(0), alpha=1.5)
    sizes = np.sort([len(part) for part in parts])[::-1]
    weights = np.arange(1, 101) ** -1.5
    assert np.abs(sizes - 1 - 9900 * weights / weights.sum()).max() <= 1
    assert len(parts[0]) != sizes[0]  # the largest is not always the first
    equal = partition("power_law", data, 100, np.random.default_rng(0), alpha=0)
    assert {len(part) for part in equal} == {100}


def test_natural_partition_keeps_or_chooses_clients() -> None:
    clients = [np.array([2 * index, 2 * index + 1]) for index in range(10)]
    data = dataset(np.zeros(20, dtype=np.int64), natural=clients)
    kept = partition("natural", data, 10, np.random.default_rng(0))
    assert np.array_equal(np.stack(kept), np.stack(clients))
    few = partition("natural", data, 3, np.random.default_rng(0))
    assert len(few) == len({part[0] for part in few} & {client[0] for client in clients}) == 3


def test_class_counts_ignore_samples_without_a_class() -> None:
    assert class_counts([np.array([0, 1]), np.array([2, 3])], np.array([0, -100, 2, 1]), 2).tolist() == [[1, 0], [0, 1]]


def text() -> Dataset:
    split = Split(torch.zeros(5, 8), torch.zeros(5, 8))
    return Dataset("play", split, split, 90, (8,), unchanged, natural=[np.arange(5)])


@pytest.mark.parametrize(
    ("scheme", "make", "num_clients", "message"),
    [
        ("iid", lambda: balanced(10), 11, "clients.count=11 must be 1 to 10, the samples of toy"),
        ("iid", lambda: balanced(10), 0, "clients.count=0 must be 1 to 10"),
        ("dirichlet", text, 2, "play has no classes to partition by; choose one of: iid, natural"),
        ("shards", text, 2, "play has no classes"),
        ("dirichlet", lambda: dataset(np.array([0, 1, -100, 1])), 2, "toy has no classes to partition by"),
        ("pachinko", text, 2, "pachinko needs superclasses"),
        ("natural", text, 2, "clients.count=2 is more than the 1 natural clients"),
        ("natural", lambda: dataset(np.zeros(4, dtype=np.int64)), 2, "toy has none"),
    ],
)
def test_partition_with_invalid_arguments_raises(
    scheme: str, make: Callable[[], Dataset], num_clients: int, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        partition(scheme, make(), num_clients, np.random.default_rng(0))


def test_two_sizes_partition_has_the_published_sizes():
    data = balanced(60_000)
    parts = partition("two_sizes", data, 1200, np.random.default_rng(0))
    sizes = np.array([len(part) for part in parts])
    assert set(range(90, 151)) >= set(sizes[:120]) > {90, 150}
    assert set(sizes[120:]) == set(range(9, 16))
    assert sizes[:120].sum() / sizes.sum() == pytest.approx(0.526, abs=0.02)
    assert len(np.unique(np.concatenate(parts))) == sizes.sum(), "no sample has two owners"
    assert (counts_of(data, parts)[:120] > 0).all(), "all classes are mixed"


@given(seed=st.integers(0, 2**32 - 1), classes=st.integers(1, 10), num_clients=st.integers(1, 30))
@settings(max_examples=40)
def test_two_sizes_with_few_classes_has_them_in_equal_parts(seed, classes, num_clients):
    data, options = balanced(3000), {"large": [40, 60], "small": [10, 12], "classes": classes}
    parts = partition("two_sizes", data, num_clients, np.random.default_rng(seed), **options)
    assert len(np.unique(np.concatenate(parts))) == sum(map(len, parts))
    for row in counts_of(data, parts):
        counts = row[row > 0]
        assert len(counts) == classes
        assert counts.max() - counts.min() <= 1


def test_power_law_classes_are_independent_of_sizes():
    data, options = balanced(20_000), {"samples": 15_129, "classes": [1, 6]}
    parts = partition("power_law_classes", data, 100, np.random.default_rng(3), alpha=1.0, **options)
    sizes = np.array([len(part) for part in parts])
    assert sizes.sum() == 15_129
    assert sizes.max() == pytest.approx(15_129 / (1 / np.arange(1, 101)).sum(), rel=0.01)
    kinds = (counts_of(data, parts) > 0).sum(axis=1)
    assert set(kinds) == {1, 2, 3, 4, 5, 6}
    assert abs(np.corrcoef(kinds, np.log(sizes))[0, 1]) < 0.3


@pytest.mark.parametrize(
    ("scheme", "clients", "options", "words"),
    [
        ("two_sizes", 5, {"share": 1.5}, "share=1.5 must be in"),
        ("two_sizes", 5, {"small": [5, 3]}, r"small=\[5, 3\] must be the least and the most"),
        ("two_sizes", 5, {"large": [5]}, r"large=\[5\] must be the least and the most"),
        ("two_sizes", 5, {"classes": 11}, "shall have 11 classes, but the data has 10"),
        ("two_sizes", 90, {}, "the data has 1000; make them smaller"),
        ("two_sizes", 90, {"classes": 3}, "too few samples of each class"),
        ("power_law_classes", 5, {"samples": 2000}, "samples=2000 must be 5 to 1000"),
        ("dirichlet", 5, {"alpha": 0}, "alpha=0 of the partition must be above 0"),
    ],
)
def test_partition_with_invalid_options_raises(scheme, clients, options, words):
    with pytest.raises(UserError, match=words):
        partition(scheme, balanced(1000), clients, np.random.default_rng(0), **options)
