"""What engines with workers share: each worker trains whole clients, and updates come back in the plan's order.

A worker trains a client as `sequential` does, so the result is that of `sequential`, bit for bit, for any number
of workers.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from typing import TypeVar

import torch

from sharding import Plan, Shard, Update
from sharding.rounds.failures import Failure
from sharding.rounds.plan import Client
from train.engines.engine import Replies, Reply
from train.engines.sequential import SequentialEngine

AHEAD = 4  # clients queued per worker: enough to keep it busy, with memory independent of the cohort's size

Result = tuple[Update | None, float | None, Failure | None]  # a reply, its loss as a number
Encoded = tuple[bytes | None, float | None, Failure | None]  # a result as it comes from a worker
Shared = TypeVar("Shared")
Ticket = TypeVar("Ticket")


def train_in_order(
    plan: Plan,
    device: torch.device,
    ahead: int,
    share: Callable[[Shard], Shared],
    send: Callable[[Client, Shard, Shared], Ticket],
    wait: Callable[[Ticket], Result],
) -> Replies:
    """Yield the replies of a plan's clients in its order, while workers train the next clients.

    Args:
        plan: the plan of the round.
        device: the device that updates are moved to.
        ahead: the most clients that are under way at once, which bounds the memory of a large cohort.
        share: makes what all clients of the round read ready to be sent with each.
        send: has a worker train a client on its own terms and on what all share.
        wait: returns the worker's result.
    """
    order = list(plan)
    if not order:
        return
    common = share(replace(plan.template(order[0]), terms={}, tail={}))

    def start(client: Client) -> Ticket:
        return send(client, replace(plan.shard(client), whole={}), common)

    tickets = {client: start(client) for client in order[:ahead]}
    for client, later in zip_longest(order, order[ahead:]):
        update, loss, failure = wait(tickets.pop(client))
        if later is not None:
            tickets[later] = start(later)
        update = None if update is None else update.to(device)
        yield client, Reply(update, None if loss is None else torch.tensor(loss, device=device), failure)


def train_client(
    engine: SequentialEngine, client: Client, terms: Shard, common: Shard, round: int, lr: float
) -> Result:
    """Train a client in a worker, on its own terms and the tensors that all clients of the round share."""
    shard = replace(terms, whole=common.whole, fixed=terms.fixed | common.fixed)
    reply = engine.train_client(client, shard, round, lr)
    return reply.update, None if reply.loss is None else float(reply.loss), reply.failure
