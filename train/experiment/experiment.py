"""What trains one model."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from sharding import Plan, Server
from sharding.client_sampling import Sampler
from sharding.rounds.plan import Client
from train.config.schema import Config
from train.data import Dataset
from train.engines import Engine, Job
from train.experiment.clients import Clients
from train.utils.stages import set_stage


@dataclass
class Experiment:
    """What trains one model.

    Attributes:
        config: the configuration of this model; its name is that of the run, or of one of several models.
        clients: the clients that may take part.
        server: holds the model, on the device.
        sampler: chooses the clients.
        dense_nbytes: the bytes that dense FedAvg sends one client, one way.
        job: the job that the engine trains.
        make_engine: creates the engine.
        with_residual: the clients that have received what is frozen.
        engine: trains the cohorts, after `start`.
    """

    config: Config
    dataset: Dataset
    clients: Clients
    server: Server
    sampler: Sampler
    dense_nbytes: int
    job: Job
    make_engine: Callable[[Job], Engine]
    with_residual: set[Client] = field(default_factory=set)
    engine: Engine = field(init=False, repr=False)

    @property
    def model(self) -> nn.Module:
        """The server's model."""
        return self.server.model

    @property
    def result(self) -> nn.Module:
        """The model that is evaluated."""
        return self.server.result

    def start(self) -> None:
        """Create the engine, which may start processes. Before this, the parts can be inspected and restored."""
        set_stage(f"preparing the engine {self.config.engine}")
        self.engine = self.make_engine(self.job)

    def close(self) -> None:
        """Release the engine's processes, if there are any."""
        if "engine" in vars(self):
            self.engine.close()

    def use_secret(self, seed: int) -> None:
        """With privacy: draw the clients and the noise by this seed."""
        assert self.server.privacy is not None
        self.server.privacy, self.sampler.seed = replace(self.server.privacy, seed=seed), seed

    def expected_bytes(self, t: int) -> tuple[int, int]:
        """With privacy: return the bytes that round t is expected to move down and up, which tell nothing of clients.

        What is frozen is sent to a client that takes part for the first time, with the chance q (1 − q)ᵗ.
        """
        clients, (down, up) = self.config.clients, self._bytes_of_a_client
        first = self.residual_nbytes * (1 - clients.per_round / clients.count) ** t
        return round(clients.per_round * (down + first)), round(clients.per_round * up)

    @cached_property
    def residual_nbytes(self) -> int:
        """The bytes of what each client receives once, 0 if nothing is frozen."""
        return self.job.frozen.nbytes if len(self.job.frozen) else 0

    @cached_property
    def _bytes_of_a_client(self) -> tuple[float, float]:
        """The mean bytes of a client's shard, and of its update."""
        ratios, planner = Counter(self.clients.keep_ratios.values()), self.server.planner
        shards = {ratio: planner.template(self.model, ratio, max(ratios)) for ratio in ratios}
        down = sum(count * shards[ratio].nbytes for ratio, count in ratios.items())
        up = sum(count * shards[ratio].update_nbytes for ratio, count in ratios.items())
        return down / ratios.total(), up / ratios.total()

    def lr(self, t: int) -> float:
        """Return the clients' learning rate in round t."""
        local = self.config.local
        lr: float = local.schedule.build(local.optimizer.value("lr"), t, self.config.rounds)
        return lr

    def plan(self, cohort: Collection[Client], t: int) -> Plan:
        """Plan the shards of these clients for round t."""
        return self.server.plan({client: self.clients.keep_ratios[client] for client in cohort}, t)
