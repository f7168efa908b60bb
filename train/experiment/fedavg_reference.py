"""The step that FedAvg would take in a round, to compare the server's own with."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from sharding import Server, ShardPlanner
from sharding.rounds.diagnostics import alignment
from sharding.rounds.plan import Client
from train.experiment.experiment import Experiment


class FedAvgStep:
    """FedAvg's update of the model in this round; the model itself is not changed.

    For it, the cohort also trains the whole model on the batches that it trains its shards on. It is measured and
    discarded, which about doubles the cost of a round.
    """

    def __init__(self, experiment: Experiment, cohort: Sequence[Client], round: int) -> None:
        twin = Server(deepcopy(experiment.server.model), ShardPlanner("dense"))
        plan = twin.plan(dict.fromkeys(cohort, 1.0), round)
        scaled = bool(experiment.job.lr_scales)  # then a client's data count in its steps, and all updates count alike
        average = twin.average(plan, dict.fromkeys(plan, 1.0) if scaled else experiment.clients.num_samples)
        for client, reply in experiment.engine.train(plan, round, experiment.lr(round)):
            average.add(client, reply.failure or reply.update)
        twin.step(average)
        self._before = flatten(experiment.server.model)
        self._update = flatten(twin.model) - self._before

    def cosine(self, model: nn.Module) -> float:
        """Return the cosine between this update and the one that made `model`; NaN if either is zero."""
        return alignment(flatten(model) - self._before, self._update)


@torch.no_grad()
def flatten(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
