"""Several clients of one keep ratio in one batched step.

The clients of a keep ratio have models of one shape, so that a *bunch* of them can be trained as one folded model (see
`folding` and `profile`): one step of it is a step of each. Where a client's batch is smaller than the others' it is
padded with samples that do not count, and a client that has taken all its steps stands still. What the clients' models
compute side by side never meets: one client's NaN stays its own.

Where measuring says that one by one is faster (on CPU: where a single client's batch keeps a core busy), or a model
cannot be folded, the clients are trained as `sequential` does. Bunches do not depend on the number of workers; so
neither do results.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import cycle, islice

import torch
from torch import nn

from sharding import Plan, Shard
from sharding.planner import Client
from train.dropout import key_dropout
from train.engines.base import Job, Update, Updates
from train.engines.fastest import fastest
from train.engines.folding import NotFoldableError
from train.engines.profile import Batches, Profile
from train.engines.sequential import SequentialEngine, size_of
from train.layout import channels_last
from train.local import ClientData, num_steps, train_locally

log = logging.getLogger(__name__)

WIDTH = 5  # clients in a bunch on CPU: more would gain little, and leave workers without a bunch
GAIN = 0.1  # of the time that training together must save: it takes the memory of all, and is harder to share out
TOLERANCE = 1e-3  # of a folded model's logits from its clients' own, relative to the largest: far above rounding


@dataclass(frozen=True)
class Bunch:
    """Clients of one keep ratio that are trained together, those with the most steps first, and all their steps."""

    ratio: float
    clients: tuple[Client, ...]
    steps: int = 0


class StackedEngine:
    """Trains the clients bunch by bunch."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.sequential = SequentialEngine(job)
        self._profiles: dict[tuple[float | None, int], Profile] = {}
        self._pays: dict[float, bool] = {}

    def train(self, plan: Plan, round: int, lr: float) -> Updates:
        """Yield the clients' updates, bunch by bunch."""
        for bunch in self.bunches(plan):
            yield from self.train_bunch(bunch, plan, round, lr)

    def bunches(self, plan: Plan) -> list[Bunch]:
        """Cut the cohort into bunches, the same whoever asks."""
        bunches = []
        for ratio, clients in plan.groups.items():
            steps = {client: self.steps(client) for client in clients}
            sound = sorted((client for client in clients if steps[client]), key=steps.__getitem__, reverse=True)
            width = self._width(ratio, sound, plan)
            together = (tuple(sound[start : start + width]) for start in range(0, len(sound), width))
            bunches += [Bunch(ratio, its, sum(steps[client] for client in its)) for its in together]
            bunches += [Bunch(ratio, (client,)) for client in clients if not steps[client]]
        return bunches

    def steps(self, client: Client) -> int:
        """Return the steps that a client will take; 0 if its data cannot tell."""
        data = self.job.clients.get(client)
        return num_steps(data, self.job.local) if isinstance(data, ClientData) else 0

    def train_bunch(self, bunch: Bunch, shards: Mapping[Client, Shard], round: int, lr: float) -> Updates:
        """Yield the updates of a bunch; should it fail together, each client is tried alone."""
        if len(bunch.clients) > 1:
            try:
                yield from self._train_together(bunch, shards, round, lr)
                return
            except Exception as error:
                log.debug("%s failed together: %s", bunch, error, exc_info=True)
        for client in bunch.clients:
            yield client, self.sequential.train_client(client, shards[client], round, lr)

    def close(self) -> None:
        """Nothing to do."""

    def _train_together(
        self, bunch: Bunch, shards: Mapping[Client, Shard], round: int, lr: float
    ) -> list[tuple[Client, Update]]:
        sent = [shards[client] for client in bunch.clients]
        profile = self._profile(sent[0], len(sent))
        profile.load(sent)
        data = [self.job.clients[client] for client in bunch.clients]
        losses = profile.train(data, [(self.job.seed, round, client) for client in bunch.clients], lr)
        returned = zip(bunch.clients, profile.read(sent), losses, strict=True)
        return [(client, Update(shard, loss)) for client, shard, loss in returned]

    def _profile(self, shard: Shard, num_clients: int) -> Profile:
        """Return the model that `num_clients` shards of this one's keep ratio are trained in."""
        key = size_of(shard), num_clients
        if key not in self._profiles:
            self._profiles[key] = Profile(self.sequential.resident(shard), num_clients, self.job)
        return self._profiles[key]

    def _width(self, ratio: float, clients: list[Client], plan: Plan) -> int:
        """Return how many clients of a keep ratio to train together."""
        if not clients:
            return 1
        if ratio not in self._pays:
            trial = Trial(self.job, ratio, list(islice(cycle(clients), WIDTH)), plan)
            self._pays[ratio] = trial.folds() and trial.pays()
        on_gpu = self.job.clients[clients[0]].targets.is_cuda
        return 1 if not self._pays[ratio] else len(clients) if on_gpu else WIDTH


class Trial:
    """A short training of some clients of one keep ratio, to see whether to train them together."""

    def __init__(self, job: Job, ratio: float, clients: list[Client], shards: Mapping[Client, Shard]) -> None:
        few = 2 * job.local.batch_size  # samples, for two steps
        short: dict[Client, ClientData] = {}
        for place, client in enumerate(clients):
            data = job.clients[client]
            short[place] = ClientData(data.inputs[:few], data.targets[:few])
        self._job = replace(job, clients=short, local=job.local.model_copy(update={"epochs": 1}))
        self._shards: dict[Client, Shard] = {place: shards[client] for place, client in enumerate(clients)}
        self._bunch = Bunch(ratio, tuple(sorted(short, key=lambda place: len(short[place]), reverse=True)))
        self._engine = StackedEngine(self._job)

    @torch.no_grad()
    def folds(self) -> bool:
        """Tell whether the folded model computes what its clients' models do."""
        try:
            return self._deviation() <= TOLERANCE
        except NotFoldableError as error:
            log.info("clients are trained one by one: the model has %s", error)
        except Exception as error:  # a client's bad data, or an operation that is not by sample
            log.debug("clients are trained one by one: %s", error, exc_info=True)
        return False

    def pays(self) -> bool:
        """Tell whether training them together is faster."""
        resident = self.sequential_model()
        model = blake2b(repr(resident).encode(), digest_size=8).hexdigest()
        data = self._job.clients[self._bunch.clients[0]]
        subject = (
            f"{WIDTH} clients of {type(self._job.model).__name__} {model}, keep ratio {self._bunch.ratio}, "
            f"{self._job.local.batch_size} samples {tuple(data.inputs.shape[1:])} a step on {data.targets.device.type}"
        )
        try:
            return fastest(subject, {"alone": self._alone, "together": self._together}, GAIN) == "together"
        except Exception as error:  # a client's bad data
            log.debug("clients are trained one by one: %s", error, exc_info=True)
            return False

    def sequential_model(self) -> nn.Module:
        """Return the resident model of one client."""
        return self._engine.sequential.resident(self._shards[0])

    def _together(self) -> None:
        self._engine._train_together(self._bunch, self._shards, 0, lr=0.0)

    def _alone(self) -> None:
        model, job = self.sequential_model(), self._job
        for client in self._bunch.clients:
            self._shards[client].load_into(model)
            train_locally(model, job.clients[client], job.dataset, job.local, 0.0, job.clip, (job.seed, 0, client))
            self._shards[client].read_from(model)

    def _deviation(self) -> float:
        """Return how far the folded logits of the first step are from the clients' own."""
        clients = self._bunch.clients
        profile = self._engine._profile(self._shards[0], len(clients))
        profile.load([self._shards[client] for client in clients])
        batches = Batches([self._job.clients[c] for c in clients], [(0, 0, c) for c in clients], self._job)
        folded = profile.logits(batches, 0).unflatten(0, (len(clients), -1))
        model = self.sequential_model().train()
        masks, worst = key_dropout(model), 0.0
        for place, client in enumerate(clients):
            self._shards[client].load_into(model)
            masks.begin(batches.seeds[0, place])
            alone = model(channels_last(self._job.dataset.prepare(batches.inputs[0, place])))
            worst = max(worst, float((folded[place] - alone).abs().max() / alone.abs().max().clamp(min=1.0)))
        return worst
