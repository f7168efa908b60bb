"""Several clients of one keep ratio in one batched step.

The clients of a keep ratio have models of one shape, so that a *bunch* of them can be trained as one folded model (see
`folding` and `profile`): one step of it is a step of each. Where a client's batch is smaller than the others' it is
padded with samples that do not count, and a client that has taken all its steps stands still. What the clients' models
compute side by side never meets: one client's NaN stays its own.

Where one by one is faster (on CPU: where a single client's batch keeps a core busy), or a model cannot be folded, the
clients are trained as `sequential` does; see `trial`. Bunches do not depend on the number of workers; so neither do
results.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from sharding import Plan, Shard
from sharding.planner import Client
from train.engines.base import Job, Update, Updates
from train.engines.profile import Profile
from train.engines.sequential import SequentialEngine, size_of
from train.engines.trial import train_together
from train.local import ClientData, largest_batch, num_steps

log = logging.getLogger(__name__)

WIDTH = 5  # clients in a bunch on CPU: more would gain little, and leave workers without a bunch
SPREAD = 2.0  # how many times another's work a client of its bunch may have on CPU, where padding costs as work does


@dataclass(frozen=True)
class Bunch:
    """Clients of one keep ratio that are trained together, those with the most steps first, and all their steps."""

    ratio: float
    clients: tuple[Client, ...]
    steps: int = 0


def cut(work: Sequence[int], width: int, spread: float) -> list[slice]:
    """Cut clients, those with the most work first, into bunches that work side by side.

    Args:
        work: of each client.
        width: clients in a bunch, at most.
        spread: the most work in a bunch over the least, at most.
    """
    starts = [0] if work else []
    for place, its in enumerate(work):
        if place - starts[-1] == width or spread * its < work[starts[-1]]:
            starts.append(place)
    return [slice(start, end) for start, end in pairwise([*starts, len(work)])]


class StackedEngine:
    """Trains the clients bunch by bunch."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.sequential = SequentialEngine(job)
        self._profiles: dict[tuple[float | None, int], Profile] = {}

    def train(self, plan: Plan, round: int, lr: float) -> Updates:
        """Yield the clients' updates, bunch by bunch."""
        for bunch in self.bunches(plan):
            yield from self.train_bunch(bunch, plan, round, lr)

    def bunches(self, plan: Plan) -> list[Bunch]:
        """Cut the cohort into bunches, the same whoever asks."""
        bunches = []
        for ratio, clients in plan.groups.items():
            steps = {client: self.steps(client) for client in clients}
            sound = [client for client in clients if steps[client]]
            sound.sort(key=lambda client: (steps[client], self._rows(client)), reverse=True)  # little to pad
            together = cut([steps[client] * self._rows(client) for client in sound], *self._limits(sound, plan))
            bunches += [
                Bunch(ratio, tuple(sound[its]), sum(steps[client] for client in sound[its])) for its in together
            ]
            bunches += [Bunch(ratio, (client,)) for client in clients if not steps[client]]
        return bunches

    def steps(self, client: Client) -> int:
        """Return the steps that a client will take; 0 if its data cannot tell."""
        data = self.job.clients.get(client)
        return num_steps(data, self.job.local) if isinstance(data, ClientData) else 0

    def _rows(self, client: Client) -> int:
        return largest_batch(len(self.job.clients[client]), self.job.local)

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

    def _limits(self, clients: list[Client], plan: Plan) -> tuple[int, float]:
        """Return how many clients of a keep ratio to train together, and how unequal they may be."""
        if not clients or self.job.step_scales:  # what trains clients together knows one step size
            return 1, SPREAD
        shard = plan[clients[0]]
        if not train_together(self.sequential.resident(shard), size_of(shard), self.job):
            return 1, SPREAD
        on_gpu = self.job.clients[clients[0]].targets.is_cuda  # where more clients cost less than more launches
        return (len(clients), inf) if on_gpu else (WIDTH, SPREAD)
