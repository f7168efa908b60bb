"""What trains one model."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import nn

from sharding import Plan, Server
from sharding.client_sampling import Sampler
from sharding.rounds.plan import Client
from train.config.schema import Config
from train.data import Dataset, Split
from train.engines import Engine, Job
from train.utils.stages import set_stage


@dataclass
class Experiment:
    """What trains one model.

    Attributes:
        config: of this model; its name is that of the run, or of one of several models.
        training: the samples of all clients.
        server: holds the model, on the device.
        sampler: chooses the clients.
        keep_ratios: r of every client.
        num_samples: D_c of every client.
        dense_nbytes: what dense FedAvg sends one client, one way.
        residual_nbytes: what each client receives once, 0 if nothing is frozen.
        job: what the engine trains.
        make_engine: creates the engine.
        with_residual: the clients that have received what is frozen.
        node_keys: in a federation, a digest of the public key of each client's node.
        engine: trains the cohorts, after `start`.
    """

    config: Config
    dataset: Dataset
    training: Split
    server: Server
    sampler: Sampler
    keep_ratios: Mapping[Client, float]
    num_samples: Mapping[Client, int]
    dense_nbytes: int
    residual_nbytes: int
    job: Job
    make_engine: Callable[[Job], Engine]
    with_residual: set[Client] = field(default_factory=set)
    node_keys: Sequence[str] = ()
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
    def _bytes_of_a_client(self) -> tuple[float, float]:
        """The mean bytes of a client's shard, and of its update."""
        ratios, planner = Counter(self.keep_ratios.values()), self.server.planner
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
        return self.server.plan({client: self.keep_ratios[client] for client in cohort}, t)
