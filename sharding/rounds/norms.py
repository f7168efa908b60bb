"""The length of an update, by which client sampling weights clients and privacy clips them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from sharding.matrices.values import difference
from sharding.modules.state import is_statistic
from sharding.rounds.shard import Shard, Update


def update_norm(sent: Shard, update: Update) -> Tensor:
    """Return ‖U‖, a scalar on the device: the change of every vector u', v' and whole parameter that a client trains.

    Client sampling weights clients by it. Running statistics of batch norms do not enter: they would be most of it. NaN
    or Inf in the update shows in the norm.
    """
    before, after = sent.trained(), {name: part for name, part in update.trained().items() if not is_statistic(name)}
    if update.changes:
        return norm_of(after)
    return norm_of({name: difference(part.to(before[name].device), before[name]) for name, part in after.items()})


def norm_of(changes: Mapping[str, Tensor]) -> Tensor:
    """Return the norm of all these tensors together, a scalar in float64; 0 of none.

    The sum is in the order of names and rows, so that an update gives the same bits before and after it is sent.
    """
    squares = [changes[name].double().contiguous().square().sum() for name in sorted(changes)]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)
