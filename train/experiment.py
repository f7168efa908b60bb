"""The parts of a run: one task for each model, and the sampler that chooses their clients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor, nn

from sharding import Plan, Server
from sharding.aggregation.aggregate import Aggregation
from sharding.client_sampling import Participation, Sampler
from sharding.client_sampling.network import Profiles
from sharding.plan import Client
from train.config.schema import Config
from train.data import Dataset, Split
from train.engines import Engine, Job
from train.metrics import RoundMetrics, measure
from train.utils.stages import set_stage


@dataclass
class Task:
    """The parts that train one model.

    Attributes:
        training: the samples of all clients.
        server: holds the model, on the device.
        keep_ratios: r of every client.
        num_samples: D_c of every client.
        dense_nbytes: what dense FedAvg sends one client, one way.
        residual_nbytes: what each client receives once, 0 if nothing is frozen.
        job: what the engine trains.
        make_engine: creates the engine.
        with_residual: the clients that have received what is frozen.
    """

    config: Config
    dataset: Dataset
    training: Split
    server: Server
    keep_ratios: Mapping[Client, float]
    num_samples: Mapping[Client, int]
    dense_nbytes: int
    residual_nbytes: int
    job: Job
    make_engine: Callable[[Job], Engine]
    with_residual: set[Client] = field(default_factory=set)

    @cached_property
    def engine(self) -> Engine:
        """The engine that trains the cohorts, created on first use because some engines start processes."""
        set_stage(f"preparing the engine {self.config.engine}")
        return self.make_engine(self.job)

    def close(self) -> None:
        """Release the engine's processes, if there are any."""
        if "engine" in vars(self):
            self.engine.close()

    def lr(self, t: int) -> float:
        """Return the clients' learning rate in round t."""
        local = self.config.local
        lr: float = local.schedule.build(local.optimizer.value("lr"), t, self.config.rounds)
        return lr

    def plan(self, cohort: Sequence[Client], t: int) -> Plan:
        """Plan the shards of these clients for round t."""
        return self.server.plan({client: self.keep_ratios[client] for client in cohort}, t)

    def measure(
        self,
        t: int,
        plan: Plan,
        selection: Participation,
        aggregation: Aggregation,
        losses: Mapping[Client, Tensor],
        profiles: Profiles | None,
    ) -> RoundMetrics:
        """Return the metrics of a round, and note which clients now have what is frozen."""
        sizes = self.num_samples, self.dense_nbytes, profiles, self.residual_nbytes
        metrics = measure(t, plan, selection, aggregation, losses, *sizes, self.with_residual)
        self.with_residual.update(metrics.new_clients or ())
        return metrics


@dataclass
class Experiment:
    """The parts of a run.

    Attributes:
        tasks: by name; a run of one model has one, of the run's name.
        sampler: chooses the clients.
        node_keys: in a federation, a digest of the public key of each client's node.
    """

    config: Config
    tasks: Mapping[str, Task]
    sampler: Sampler
    node_keys: Sequence[str] = ()

    @property
    def model(self) -> nn.Module:
        """The server's model."""
        (task,) = self.tasks.values()
        return task.server.model

    @property
    def result(self) -> nn.Module:
        """The model that is evaluated."""
        (task,) = self.tasks.values()
        return task.server.result

    def close(self) -> None:
        """Release the engines' processes, if there are any."""
        for task in self.tasks.values():
            task.close()

    def invite(self, t: int) -> dict[str, list[int]]:
        """Return the clients that train each model in round t."""
        return {name: self.sampler.cohort(t) for name in self.tasks}

    def select(
        self, t: int, plans: Mapping[str, Plan], norms: Mapping[str, Mapping[Client, float]]
    ) -> dict[str, Participation]:
        """Return the clients whose updates count for each model, and their weights.

        Args:
            t: the round.
            plans: of the clients that were invited.
            norms: ‖U‖/lr of each client's update; empty unless the sampler needs them.
        """
        return {
            name: self.sampler.select(t, [int(client) for client in plan], norms.get(name, {}))
            for name, plan in plans.items()
        }

    def summarize(self, metrics: Mapping[str, RoundMetrics]) -> RoundMetrics:
        """Return the metrics of a round from those of its models."""
        (of_task,) = metrics.values()
        return of_task
