"""The length of an update, by which client sampling weights clients and the norm bound rejects them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sharding.matrices.values import difference
from sharding.modules.state import is_statistic
from sharding.rounds.shard import Shard, Update


def update_norm(sent: Shard, update: Update) -> Tensor:
    """Return ‖U‖, a scalar on the device: the change of every vector u', v' and whole parameter that a client trains.

    Client sampling weights clients by it. Running statistics of batch norms do not enter: they would be most of it. NaN
    or Inf in the update shows in the norm. The sum is in the order of names and rows, so that an update gives the same
    bits before and after it is sent.
    """
    return _norm_of_difference(sent, update, [name for name in update.trained() if not is_statistic(name)])


def statistics_norm(sent: Shard, update: Update) -> Tensor:
    """Return the norm of the change of all batch norms' running statistics, a scalar on the device."""
    return _norm_of_difference(sent, update, [name for name in update.trained() if is_statistic(name)])


def _norm_of_difference(sent: Shard, update: Update, names: Sequence[str]) -> Tensor:
    before, after = sent.trained(), update.trained()
    if not names:
        return torch.zeros((), dtype=torch.float64)
    if not update.changes:
        after = {name: difference(after[name].to(before[name].device), before[name]) for name in names}
    changes = (after[name].double().contiguous() for name in sorted(names))
    return torch.stack([change.square().sum() for change in changes]).sum().sqrt()
