"""The server of federated training: it holds the model, cuts shards, averages the updates and takes its step.

One round is `plan` → updates → `aggregate`; `round` does all three with a function that trains a client's shard.
"""

from collections.abc import Callable, Mapping

from torch import nn
from torch.optim.swa_utils import AveragedModel

from sharding.aggregation.aggregate import Aggregation, Average, Returned
from sharding.aggregation.server_optimizer import ServerOptimizer
from sharding.planner import Client, Plan, ShardPlanner
from sharding.shard import Shard


class Server:
    """Hold the model and run rounds of federated training.

    A plain server with the strategy `collective` runs the published algorithm. ``python -m train`` has other defaults,
    for which 0.02 is a good first learning rate::

        model = merge(factorize(model, largest))  # a low-rank start; largest is the largest keep ratio of a client
        optimizer = ServerOptimizer(model, "nesterov", lr=0.4, momentum=0.8)
        server = Server(model, ShardPlanner("top_n"), optimizer, iterate_average(model))
        for number in range(rounds):
            server.round(number, keep_ratios, train, num_samples)
        evaluate(server.result)

    Args:
        model: dense; trained in place.
        planner: draws the terms of each client.
        optimizer: takes the server's step; FedAvg's by default.
        averaged: the average of the rounds' models (`iterate_average`), if the average is evaluated.
        norm_bound: leaves out updates above this multiple of the median norm, see `Average`.
        trim: share of the values that the trimmed mean leaves out, see `Average`.
        max_share: the most that one client may have of a round's weights, see `Average`.
    """

    def __init__(
        self,
        model: nn.Module,
        planner: ShardPlanner,
        optimizer: ServerOptimizer | None = None,
        averaged: AveragedModel | None = None,
        norm_bound: float | None = None,
        trim: float = 0.0,
        max_share: float = 1.0,
    ) -> None:
        self.model, self.planner, self.averaged = model, planner, averaged
        self.optimizer = ServerOptimizer(model) if optimizer is None else optimizer
        self._norm_bound, self._trim, self._max_share = norm_bound, trim, max_share

    @property
    def result(self) -> nn.Module:
        """The model to evaluate: the average of the rounds' models if there is one, else the last model."""
        return self.model if self.averaged is None else self.averaged.module

    def plan(self, keep_ratios: Mapping[Client, float], round: int) -> Plan:
        """Cut a shard for each of these clients."""
        return self.planner.plan(self.model, keep_ratios, round)

    def aggregate(
        self, plan: Plan, updates: Returned, num_samples: Mapping[Client, float], total: float | None = None
    ) -> Aggregation:
        """Average the clients' updates, and take the server's step.

        Args:
            plan: of this round.
            updates: the trained shards by client, or a stream of pairs; None where a client failed.
            num_samples: D_c, or D_c/p_c where clients were sampled.
            total: of all samples that might have counted, where clients were sampled; see `Average.write_to`.
        """
        average = self.average(plan, num_samples)
        average.add_all(updates)
        return self.step(average, total)

    def average(self, plan: Plan, num_samples: Mapping[Client, float]) -> Average:
        """Return an empty average that takes a round's updates one by one, with the server's guards."""
        return Average(plan, num_samples, self._norm_bound, self._trim, self._max_share)

    def step(self, average: Average, total: float | None = None) -> Aggregation:
        """Move the model to the average, by the server's optimizer; return which clients were averaged in."""
        self.optimizer.remember()  # weights may have been loaded since the last step
        outcome = average.write_to(self.model, total, self.optimizer.rate)
        self.optimizer.step()
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)
        return outcome

    def round(
        self,
        round: int,
        keep_ratios: Mapping[Client, float],
        train: Callable[[Client, Shard], Shard | None],
        num_samples: Mapping[Client, float] | None = None,
    ) -> Aggregation:
        """Run one round and return which clients were averaged in.

        Args:
            round: its number, from 0; the draws depend on it and on the planner's seed.
            keep_ratios: r of each client that takes part.
            train: trains a client's shard and returns the update (`train_shard`), or None where the client failed.
            num_samples: D_c, the clients' weights; equal by default.
        """
        plan = self.plan(keep_ratios, round)
        updates = ((client, train(client, shard)) for client, shard in plan.items())
        return self.aggregate(plan, updates, num_samples or dict.fromkeys(plan, 1.0))
