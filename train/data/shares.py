"""All clients' samples in one pair of tensors, which processes on one machine can share."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from torch import Tensor

from sharding.rounds.plan import Client
from train.data.dataset import Split


class Shares(Mapping[Client, Split]):
    """The samples of each client, views of common tensors.

    Args:
        inputs: the inputs of all clients, one client after the other.
        targets: the targets of all clients, in the same order.
        sizes: D_c of clients 0, 1, ….
    """

    def __init__(self, inputs: Tensor, targets: Tensor, sizes: Sequence[int]) -> None:
        self._inputs, self._targets = inputs, targets
        self._ends = list(accumulate(sizes, initial=0))

    def __getitem__(self, client: Client) -> Split:
        if client not in range(len(self)):
            raise KeyError(client)
        rows = slice(self._ends[int(client)], self._ends[int(client) + 1])
        return Split(self._inputs[rows], self._targets[rows])

    def all(self) -> Split:
        """Return the samples of all clients, one client after the other."""
        return Split(self._inputs, self._targets)

    def __iter__(self) -> Iterator[Client]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self._ends) - 1
