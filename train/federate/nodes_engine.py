"""The engine whose clients are nodes: it sends shards and accepts the replies that arrive in time.

Messages go through `sharding.flower.exchange`, so the server's memory does not grow with the cohort.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from flwr.app import MessageType, RecordDict

from sharding import Plan
from sharding.flower.exchange import Exchange, Result
from sharding.flower.messages import CONFIG
from sharding.flower.nodes import Node
from sharding.rounds.aggregation.faults import find_misfit
from sharding.rounds.failures import Failure, Kind
from sharding.rounds.plan import Client
from train.engines import Job, Replies, Reply
from train.engines.two_stage import Reports, TwoStageEngine
from train.federate.messages import LR, ROUND, UPLOAD, norm_of, read_norm, read_reply
from train.federate.roster import Roster

CLOSE = 1e-3  # the allowed relative difference between a reported norm and ours, since machines round differently


class NodesEngine(TwoStageEngine):
    """Lets the node that holds a client's data train its shard."""

    def __init__(self, roster: Roster, job: Job) -> None:
        self._roster, self._job = roster, job
        self._exchange = Exchange(roster, roster.timeouts.round)

    def train(self, plan: Plan, round: int, lr: float) -> Replies:
        """Yield the clients' replies: those of absent clients first, the others in the order of the plan.

        A client whose node is absent, fails, or has not replied at the round's deadline has a failure in its place.
        """
        for client, answer in self._train(plan, round, lr, self._read):
            yield client, _reply(answer)

    def report(self, plan: Plan, round: int, lr: float) -> Reports:
        """Let every node train and report its update's norm; the nodes of selected clients send their updates.

        An update with another norm than its node reported is a failure.
        """
        answers = dict(self._train(plan, round, lr, read_norm))
        norms = {client: norm for client, norm in answers.items() if not isinstance(norm, Failure)}

        def collect(selected: Collection[Client]) -> Replies:
            yield from ((c, Reply(None, None, answer)) for c, answer in answers.items() if isinstance(answer, Failure))
            wanted = [client for client in norms if client in selected]
            for client, answer in self._ask(wanted, self._read, UPLOAD, round, lambda _: {"plan": plan.id}):
                if isinstance(answer, Failure) and answer.kind == Kind.ABSENT:
                    # A node that leaves now has received its shard, so it does not count as absent.
                    answer = replace(answer, kind=Kind.LATE)  # noqa: PLW2901
                reply = _reply(answer)
                failure = None if reply.update is None else _contradiction(plan, client, reply, norms[client], lr)
                yield client, reply if failure is None else Reply(None, None, failure)

        return Reports(norms, collect)

    def _train(
        self, plan: Plan, round: int, lr: float, read: Callable[[RecordDict], Result]
    ) -> Iterator[tuple[Client, Result | Failure]]:
        def values(node: Node) -> dict[str, Any]:
            return {ROUND: round, LR: self._job.lr(node.client, lr), **self._roster.question[CONFIG]}

        return self._ask(plan, read, MessageType.TRAIN, round, values, plan, self._job.frozen)

    def _ask(
        self, clients: Collection[Client], read: Callable[[RecordDict], Result], kind: str, *message: Any
    ) -> Iterator[tuple[Client, Result | Failure]]:
        """Yield the answers of clients' nodes to messages, or why there is none; first those of absent nodes."""
        nodes = self._roster.reach(clients)
        absent = Failure(Kind.ABSENT, "its node is not connected")
        yield from ((client, absent) for client in clients if client not in nodes)
        messages = self._exchange.messages(kind, nodes.values(), *message)
        replies = self._exchange.send_and_receive(messages, timeout=self._roster.timeouts.round)
        yield from self._exchange.answers(replies, read)

    def _read(self, content: RecordDict) -> Reply:
        reply = read_reply(content)
        assert reply.update is not None
        return replace(reply, update=reply.update.to(self._job.device))


def _reply(answer: Reply | Failure) -> Reply:
    return Reply(None, None, answer) if isinstance(answer, Failure) else answer


def _contradiction(plan: Plan, client: Client, reply: Reply, reported: float, lr: float) -> Failure | None:
    """Return why an update cannot be the one whose norm was reported, or None."""
    assert reply.update is not None
    if (misfit := find_misfit(plan.template(client), reply.update)) is not None:
        return misfit
    norm = norm_of(plan.shard(client), reply.update, lr)
    if abs(norm - reported) <= CLOSE * norm:
        return None
    return Failure(Kind.CONTRADICTORY, f"its update has a norm of {norm:.4g}, but it reported {reported:.4g}")
