"""The engine whose clients are nodes: it sends shards, and takes in what comes back in time."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from flwr.app import Message, MessageType, RecordDict

from sharding import Plan
from sharding.clients import Heard, Sampler
from sharding.errors import UserError
from sharding.planner import Client
from train.engines import Job, Update
from train.engines.base import Updates
from train.federate.consult import Consultation
from train.federate.messages import Order, content_of, read_reply
from train.federate.nodes import SLACK, Nodes, ask
from train.federate.reports import Report

Answer = TypeVar("Answer")


class NodesEngine:
    """Has each client of a plan trained by the node that holds its data."""

    def __init__(self, nodes: Nodes, job: Job) -> None:
        self._nodes, self._job, self._device = nodes, job, job.dataset.test.targets.device
        self._config = nodes.config.model_copy(update={"local": job.local})

    def train(self, plan: Plan, round: int, lr: float) -> Updates:
        """Yield the clients' updates in the order of the plan, whatever the order of the replies.

        Who is not there, fails, or has not replied at the round's deadline is a failure that says so.
        """
        updates, failures = self._exchange(MessageType.TRAIN, self._orders(plan, round, lr), read_reply, round)
        for client in plan:
            yield client, Update(None, None, failures[client]) if client in failures else self._here(updates[client])

    def consult(self, sampler: Sampler, plan: Plan, round: int, lr: float) -> tuple[Heard, Updates]:
        """Have every node train and report, settle who is heard, and have only those send their update."""
        reports, failures = self._exchange(MessageType.TRAIN, self._orders(plan, round, lr), Report.from_record, round)
        exchange = partial(self._exchange, round=round)
        consultation = Consultation(exchange, sampler, plan, round, lr, self._device, failures)
        heard, sent = consultation.settle(reports)
        sent = {client: self._here(update) for client, update in sent.items()}
        return heard, iter([(c, sent.get(c) or Update(None, None, failures.get(c))) for c in plan])

    def close(self) -> None:
        """Nothing to do: nodes are not ours."""

    def _orders(self, plan: Plan, round: int, lr: float) -> dict[Client, RecordDict]:
        return {
            client: Order(self._config, shard, round, self._job.step_size(client, lr)).to_record()
            for client, shard in plan.items()
        }

    def _exchange(
        self, kind: str, contents: Mapping[Client, RecordDict], read: Callable[[RecordDict], Answer], round: int
    ) -> tuple[dict[Client, Answer], dict[Client, str]]:
        """Send a message to the node of each client; return what they answer, and why others have not."""
        nodes, patience = self._nodes.online(), self._nodes.patience.round
        messages = {
            client: Message(
                content, dst_node_id=nodes[int(client)], message_type=kind, ttl=patience + SLACK, group_id=str(round)
            )
            for client, content in contents.items()
            if client in nodes
        }
        replies = dict(ask(self._nodes.grid, messages, patience)) if messages else {}
        answers: dict[Client, Answer] = {}
        failures: dict[Client, str] = {}
        for client in contents:
            try:
                if client not in messages:
                    raise UserError("its node is not there")
                if client not in replies:
                    raise UserError(f"no reply within {patience:g} s")
                answers[client] = read(content_of(replies[client]))
            except UserError as why:
                failures[client] = str(why)
        return answers, failures

    def _here(self, update: Update) -> Update:
        assert update.shard is not None
        return Update(update.shard.to(self._device), update.loss)
