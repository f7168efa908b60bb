"""A design, a sampler of clients, and a partition.

`python -m train run configs/quickstart.yaml --import examples.own_draws strategy=collective design=random_order`

The sampler is `clients.sampler=in_turn`, and the partition `data.partition=halves`.
"""

import numpy as np
from numpy.typing import NDArray

from sharding import Sampler
from train.data import Dataset
from train.data.partition import Partition
from train.registries import DESIGNS, PARTITIONS, SAMPLERS


class RandomOrder:
    """Systematic sampling after a shuffle: it honors π, and any two terms may meet.

    Args:
        chances: π of the terms that are not certain, strictly between 0 and 1.
        count: their sum, how many to draw.
    """

    def __init__(self, chances: NDArray[np.float64], count: int) -> None:
        self.chances, self.count = chances, count

    def draw(self, rng: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Return positions, (size, count)."""
        return np.stack([self._draw(rng) for _ in range(size)])

    def _draw(self, rng: np.random.Generator) -> NDArray[np.int64]:
        order = rng.permutation(len(self.chances))
        ends = np.cumsum(self.chances[order])
        ends *= self.count / ends[-1]
        return order[np.searchsorted(ends, rng.random() + np.arange(self.count), side="right")]


class InTurn(Sampler):
    """Invites the clients in turn."""

    name = "in_turn"

    def invite(self, round: int) -> list[int]:
        """Return the next `per_round` clients."""
        first = round * self.per_round
        return sorted((first + step) % self.num_clients for step in range(self.per_round))


def halves(dataset: Dataset, num_clients: int, rng: np.random.Generator) -> Partition:
    """Give the first clients the lower half of the classes, the others the upper half."""
    labels = dataset.train.targets.numpy()
    low, high = (rng.permutation(np.flatnonzero((labels < dataset.num_classes / 2) == half)) for half in (True, False))
    few = num_clients // 2
    return [np.sort(part) for part in (*np.array_split(low, few), *np.array_split(high, num_clients - few))]


DESIGNS["random_order"] = RandomOrder
SAMPLERS["in_turn"] = InTurn
PARTITIONS["halves"] = halves
