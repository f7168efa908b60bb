"""The engine whose clients are nodes: it sends shards and accepts the replies that arrive in time."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from sharding import Plan, Shard
from sharding.aggregation.faults import find_misfit
from sharding.client_sampling import Participation, Sampler
from sharding.errors import UserError
from sharding.failures import Failure, FailureError, Kind
from sharding.planner import Client
from train.engines import Job, Update
from train.engines.base import Updates
from train.federate.messages import UPLOAD, Order, content_of, norm_of, read_norm, read_reply
from train.federate.roster import SLACK, Nodes, ask

Answer = TypeVar("Answer")
CLOSE = 1e-3  # the allowed relative difference between a reported norm and ours, since machines round differently


class NodesEngine:
    """Lets the node that holds a client's data train its shard."""

    def __init__(self, nodes: Nodes, job: Job) -> None:
        self._nodes, self._job, self._device = nodes, job, job.device
        self._config = nodes.config.model_copy(update={"local": job.local})

    def train(self, plan: Plan, round: int, lr: float) -> Updates:
        """Yield the clients' updates in the order of the plan, whatever the order of the replies.

        A client whose node is absent, fails, or has not replied at the round's deadline has a failure in its place.
        """
        updates, failures = self._exchange(MessageType.TRAIN, self._orders(plan, round, lr), read_reply, round)
        for client in plan:
            yield client, Update(None, None, failures[client]) if client in failures else self._here(updates[client])

    def consult(self, sampler: Sampler, plan: Plan, round: int, lr: float) -> tuple[Participation, Updates]:
        """Let every node train and report its update's norm; the clients that the sampler selects send their updates.

        An update with another norm than its node reported is a failure.
        """
        norms, failures = self._exchange(MessageType.TRAIN, self._orders(plan, round, lr), read_norm, round)
        selected = sampler.select(round, [int(client) for client in plan], norms)
        wanted = {
            client: RecordDict({"wanted": ConfigRecord({"plan": plan[client].plan})})
            for client in plan
            if client in selected.weights
        }
        sent, lost = self._exchange(UPLOAD, wanted, read_reply, round)
        # A node that leaves now has received its shard, so it does not count as absent.
        gone = {client: replace(why, kind=Kind.LATE) for client, why in lost.items() if why.kind == Kind.ABSENT}
        return selected, self._as_reported(plan, norms, sent, failures | lost | gone, lr)

    def close(self) -> None:
        """Do nothing: the nodes are not ours."""

    def _as_reported(
        self,
        plan: Plan,
        norms: Mapping[Client, float],
        sent: Mapping[Client, Update],
        failures: Mapping[Client, Failure],
        lr: float,
    ) -> Iterator[tuple[Client, Update]]:
        for client, order in plan.items():
            if client not in sent:
                yield client, Update(None, None, failures.get(client))
                continue
            update = self._here(sent[client])
            why = _contradiction(order, update, norms[client], lr)
            yield client, update if why is None else Update(None, None, why)

    def _orders(self, plan: Plan, round: int, lr: float) -> dict[Client, RecordDict]:
        return {
            client: Order(self._config, shard, round, self._job.step_size(client, lr)).to_record()
            for client, shard in plan.items()
        }

    def _exchange(
        self, kind: str, contents: Mapping[Client, RecordDict], read: Callable[[RecordDict], Answer], round: int
    ) -> tuple[dict[Client, Answer], dict[Client, Failure]]:
        """Send a message to the node of each client; return the answers, and the failures of the other clients."""
        nodes, patience = self._nodes.reach({int(client) for client in contents}), self._nodes.patience.round
        messages = {
            client: Message(
                content, dst_node_id=nodes[int(client)], message_type=kind, ttl=patience + SLACK, group_id=str(round)
            )
            for client, content in contents.items()
            if client in nodes
        }
        replies = dict(ask(self._nodes.grid, messages, patience)) if messages else {}
        answers: dict[Client, Answer] = {}
        failures: dict[Client, Failure] = {}
        for client in contents:
            try:
                if client not in messages:
                    raise FailureError(Kind.ABSENT, "its node is not connected")
                if client not in replies:
                    raise FailureError(Kind.LATE, f"no reply within {patience:g} s")
                answers[client] = read(content_of(replies[client]))
            except UserError as why:
                failures[client] = Failure.of(why)
        return answers, failures

    def _here(self, update: Update) -> Update:
        assert update.shard is not None
        return Update(update.shard.to(self._device), update.loss)


def _contradiction(order: Shard, update: Update, reported: float, lr: float) -> Failure | None:
    """Return why an update cannot be the one whose norm was reported, or None."""
    assert update.shard is not None
    if (misfit := find_misfit(order, update.shard)) is not None:
        return misfit
    norm = norm_of(order, update.shard, lr)
    if abs(norm - reported) <= CLOSE * norm:
        return None
    return Failure(Kind.CONTRADICTORY, f"its update has a norm of {norm:.4g}, but it reported {reported:.4g}")
