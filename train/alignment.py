"""The cosine between a round's update and FedAvg's, from the same model, cohort and batches.

For FedAvg's update, the cohort also trains the whole model on the batches that it trains its shards on. The update is
measured and discarded, which about doubles the cost of a round.
"""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from sharding import Server, ShardPlanner
from sharding.diagnostics import alignment
from sharding.planner import Client
from train.experiment import Experiment
from train.participation import step_size


class FedAvgStep:
    """FedAvg's update of the server's model in this round; the model itself is not changed."""

    def __init__(self, experiment: Experiment, cohort: Sequence[Client], round: int) -> None:
        twin = Server(deepcopy(experiment.model), ShardPlanner("dense"))
        plan = twin.plan(dict.fromkeys(cohort, 1.0), round)
        updates = experiment.engine.train(plan, round, step_size(experiment.config, round))
        twin.aggregate(plan, ((client, update.shard) for client, update in updates), experiment.num_samples)
        self._before = flatten(experiment.model)
        self._update = flatten(twin.model) - self._before

    def cosine(self, model: nn.Module) -> float:
        """Return the cosine between this update and the one that made `model`; NaN if either is zero."""
        return alignment(flatten(model) - self._before, self._update)


@torch.no_grad()
def flatten(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
