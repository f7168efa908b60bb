"""The cohort shared out among processes: over the cores of a machine, or over GPUs and hosts under torchrun.

The process of rank 0 runs the rounds. Each round it deals the bunches of `stacked` out by a greedy schedule, longest
first, each to the process with the least to do; it trains its own share and takes the others' updates in, in the order
of the bunches. What a process computes depends on the bunch alone, and rank 0 sums up in one order: the result is that
of `stacked`, bit for bit, for any number of processes (of one thread each). Shards are small by design, so sending each
update home costs little beside training it; sums formed on the way would depend on who trained what.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

import torch
import torch.distributed as dist

from sharding import Plan
from sharding.errors import UserError
from sharding.planner import Client
from train.engines.base import Job, Update, Updates
from train.engines.letters import Mail, Order, Parcel
from train.engines.post import Gloo, Inbox, Line, Mailbox
from train.engines.stacked import Bunch, StackedEngine
from train.engines.workers import AHEAD, Workers, num_cores


class ProcessesEngine:
    """Trains bunches in several processes; made in that of rank 0.

    Under torchrun these are the processes that it started. Else they are started here, one a core, and end with the
    engine.

    Args:
        job: what there is to train; workers on this machine share its data's memory.
        num_workers: processes in all, by default one a core.

    Raises:
        UserError: the job is on a GPU, and torchrun did not start this process.
    """

    def __init__(self, job: Job, num_workers: int | None = None) -> None:
        self.stacked = StackedEngine(job)
        self._device = job.dataset.test.targets.device
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self._workers = None if dist.is_initialized() else Workers(job, num_workers or num_cores())
        if self._workers is None:
            self._lines: Sequence[Line] = [Gloo(rank) for rank in range(1, dist.get_world_size())]
            self._mailbox = Mailbox()
        else:
            self._lines, self._mailbox = self._workers.lines, Mailbox(self._workers.folder)
        self._handicap = 0.0  # steps that this process could take while it does what is not training

    def train(self, plan: Plan, round: int, lr: float) -> Updates:
        """Yield the clients' updates, bunch by bunch, whoever trained them.

        Raises:
            WorkerError: a worker failed or died.
        """
        bunches = self.stacked.bunches(plan)
        owners = deal([bunch.steps for bunch in bunches], len(self._lines) + 1, self._handicap)
        shares: list[list[Bunch]] = [[] for _ in range(len(self._lines) + 1)]
        for bunch, owner in zip(bunches, owners, strict=True):
            shares[owner].append(bunch)
        inboxes: dict[int, Inbox] = {}
        for rank, (line, share) in enumerate(zip(self._lines, shares[1:], strict=True), start=1):
            if share:
                line.send(self._order(share, plan, round, lr))
                inboxes[rank] = Inbox(line, len(share))
        mine, ahead = deque(shares[0]), deque[list[tuple[Client, Update]]]()
        started, training, waiting = perf_counter(), 0.0, 0.0
        for owner in owners:
            inbox, begun = inboxes.get(owner), perf_counter()
            while mine and len(ahead) < AHEAD and (not ahead if inbox is None else inbox.empty()):
                ahead.append(list(self.stacked.train_bunch(mine.popleft(), plan, round, lr)))
            trained = perf_counter()
            updates = ahead.popleft() if inbox is None else self._open(inbox.get())
            training, waiting = training + trained - begun, waiting + perf_counter() - trained
            yield from updates
        own = sum(bunch.steps for bunch in shares[0])
        latest = own * (perf_counter() - started - training - waiting) / training if own else 0.0
        self._handicap = (self._handicap + latest) / 2

    def close(self) -> None:
        """Send the workers home."""
        torch.set_num_threads(self._threads)
        if self._workers is not None:
            self._workers.stop()

    def _order(self, share: Sequence[Bunch], plan: Plan, round: int, lr: float) -> Order:
        wrap, clients = self._mailbox.wrap, [client for bunch in share for client in bunch.clients]
        dense = wrap(replace(next(iter(plan.values())), terms={}))
        return Order(round, lr, share, {client: wrap(replace(plan[client], dense={})) for client in clients}, dense)

    def _open(self, parcel: Parcel) -> list[tuple[Client, Update]]:
        return [(client, self._update(mail, loss, why)) for client, mail, loss, why in parcel.updates]

    def _update(self, mail: Mail | None, loss: float | None, failure: str | None) -> Update:
        try:
            shard = None if mail is None else Mailbox.unwrap(mail).to(self._device)
        except UserError as error:
            return Update(None, None, str(error))
        return Update(shard, None if loss is None else torch.tensor(loss, device=self._device), failure)


def deal(loads: Sequence[int], num_workers: int, handicap: float = 0.0) -> list[int]:
    """Return who takes each load: the longest first, each to the worker with the least to do so far.

    The first worker has the handicap to do already. Who takes what shows in no result.
    """
    owners, totals = [0] * len(loads), [handicap] + [0.0] * (num_workers - 1)
    for place in sorted(range(len(loads)), key=lambda place: -loads[place]):
        owners[place] = totals.index(min(totals))
        totals[owners[place]] += loads[place]
    return owners
