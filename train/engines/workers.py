"""What engines with workers share: shards go to workers in their wire form, and updates come back in the plan's order.

A worker trains whole clients as `sequential` does, so the result is that of `sequential`, bit for bit, for any number
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

Answer = tuple[bytes | None, float | None, Failure | None]  # a reply, the update in its wire form
Shared = TypeVar("Shared")
Ticket = TypeVar("Ticket")


def train_in_order(
    plan: Plan,
    device: torch.device,
    ahead: int,
    share: Callable[[bytes], Shared],
    send: Callable[[Client, bytes, Shared], Ticket],
    wait: Callable[[Ticket], Answer],
) -> Replies:
    """Yield the replies of a plan's clients in its order, while workers train the next clients.

    Args:
        plan: the plan of the round.
        device: the device that updates are moved to.
        ahead: the most clients that are under way at once, which bounds the memory of a large cohort.
        share: makes what all clients of the round read ready to be sent with each.
        send: has a worker train a client on its own terms and on what all share.
        wait: returns the worker's answer.
    """
    order = list(plan)
    if not order:
        return
    dense = share(replace(plan.template(order[0]), terms={}, tail={}).to_bytes())

    def start(client: Client) -> Ticket:
        return send(client, replace(plan.shard(client), whole={}).to_bytes(), dense)

    tickets = {client: start(client) for client in order[:ahead]}
    for client, later in zip_longest(order, order[ahead:]):
        data, loss, failure = wait(tickets.pop(client))
        if later is not None:
            tickets[later] = start(later)
        update = None if data is None else Update.from_bytes(data).to(device)
        yield client, Reply(update, None if loss is None else torch.tensor(loss, device=device), failure)


def answer(engine: SequentialEngine, client: Client, terms: bytes, dense: bytes, round: int, lr: float) -> Answer:
    """Train a client in a worker, on its own terms and the dense tensors that all clients of the round share."""
    client_shard, common = Shard.from_bytes(terms), Shard.from_bytes(dense)
    shard = replace(client_shard, whole=common.whole, fixed=client_shard.fixed | common.fixed).to(engine.job.device)
    reply = engine.train_client(client, shard, round, lr)
    data = None if reply.update is None else reply.update.to_bytes()
    return data, None if reply.loss is None else float(reply.loss), reply.failure
