"""The engine whose clients are nodes: it sends shards and accepts the replies that arrive in time.

Shards are cut, sent and forgotten one by one, and replies are fetched one by one, in the order of the plan. So the
server's memory does not grow with the cohort: what waits lies in Flower's SuperLink.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from sharding import Plan
from sharding.aggregation.faults import find_misfit
from sharding.errors import UserError
from sharding.failures import Failure, FailureError, Kind
from sharding.plan import Client
from train.engines import Engine, Job, Reports, Update
from train.engines.engine import Updates
from train.federate.messages import UPLOAD, TrainRequest, content_of, norm_of, read_norm, read_reply
from train.federate.roster import SLACK, Nodes, ask

Answer = TypeVar("Answer")
CLOSE = 1e-3  # the allowed relative difference between a reported norm and ours, since machines round differently


class NodesEngine(Engine):
    """Lets the node that holds a client's data train its shard."""

    def __init__(self, nodes: Nodes, job: Job) -> None:
        self._nodes, self._job, self._device = nodes, job, job.device
        self._config = nodes.config.model_copy(update={"local": job.local})
        self._with_residual: set[Client] = set()  # the clients that have trained with it, and so keep it

    def train(self, plan: Plan, round: int, lr: float) -> Updates:
        """Yield the clients' updates in the order of the plan, whatever the order of the replies.

        A client whose node is absent, fails, or has not replied at the round's deadline has a failure in its place.
        """
        orders = self._orders(plan, round, lr)
        for client, answer in self._exchange(MessageType.TRAIN, orders, plan, read_reply, round):
            yield client, self._here(answer)

    def report(self, plan: Plan, round: int, lr: float) -> Reports:
        """Let every node train and report its update's norm; the nodes of selected clients send their updates.

        An update with another norm than its node reported is a failure.
        """
        orders = self._orders(plan, round, lr)
        answers = dict(self._exchange(MessageType.TRAIN, orders, plan, read_norm, round))
        norms = {client: norm for client, norm in answers.items() if not isinstance(norm, Failure)}

        def collect(selected: Collection[Client]) -> Updates:
            yield from ((c, Update(None, None, answer)) for c, answer in answers.items() if isinstance(answer, Failure))
            wanted = [client for client in norms if client in selected]
            request = RecordDict({"wanted": ConfigRecord({"plan": plan.id})})
            for client, answer in self._exchange(UPLOAD, ((c, request) for c in wanted), wanted, read_reply, round):
                if isinstance(answer, Failure) and answer.kind == Kind.ABSENT:
                    # A node that leaves now has received its shard, so it does not count as absent.
                    answer = replace(answer, kind=Kind.LATE)  # noqa: PLW2901
                update = self._here(answer)
                failure = None if update.shard is None else _contradiction(plan, client, update, norms[client], lr)
                yield client, update if failure is None else Update(None, None, failure)

        return Reports(norms, collect)

    def _orders(self, plan: Plan, round: int, lr: float) -> Iterator[tuple[Client, RecordDict]]:
        for client, shard in plan.shards():
            residual = self._job.residual if shard.residual and client not in self._with_residual else None
            yield client, TrainRequest(self._config, shard, round, self._job.lr(client, lr), residual).to_record()

    def _exchange(
        self,
        kind: str,
        contents: Iterable[tuple[Client, RecordDict]],
        clients: Collection[Client],
        read: Callable[[RecordDict], Answer],
        round: int,
    ) -> Iterator[tuple[Client, Answer | Failure]]:
        """Send a message to the node of each client; yield each client's answer, or why there is none."""
        nodes, timeout = self._nodes.reach({int(client) for client in clients}), self._nodes.timeouts.round

        def messages() -> Iterator[tuple[Client, Message | None]]:
            for client, content in contents:
                node = nodes.get(int(client))
                yield (
                    client,
                    None
                    if node is None
                    else Message(
                        content, dst_node_id=node, message_type=kind, ttl=timeout + SLACK, group_id=str(round)
                    ),
                )

        for client, reply in ask(self._nodes.grid, messages(), timeout):
            try:
                if int(client) not in nodes:
                    raise FailureError(Kind.ABSENT, "its node is not connected")
                if reply is None:
                    raise FailureError(Kind.LATE, f"no reply within {timeout:g} s")
                yield client, read(content_of(reply))
                self._with_residual.add(client)
            except UserError as error:
                self._with_residual.discard(client)  # it may have lost it
                yield client, Failure.of(error)

    def _here(self, answer: Update | Failure) -> Update:
        if isinstance(answer, Failure):
            return Update(None, None, answer)
        assert answer.shard is not None
        return Update(answer.shard.to(self._device), answer.loss)


def _contradiction(plan: Plan, client: Client, update: Update, reported: float, lr: float) -> Failure | None:
    """Return why an update cannot be the one whose norm was reported, or None."""
    assert update.shard is not None
    if (misfit := find_misfit(plan.template(client), update.shard)) is not None:
        return misfit
    norm = norm_of(plan.shard(client), update.shard, lr)
    if abs(norm - reported) <= CLOSE * norm:
        return None
    return Failure(Kind.CONTRADICTORY, f"its update has a norm of {norm:.4g}, but it reported {reported:.4g}")
