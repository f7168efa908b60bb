"""The server's side of a round in which nodes report before they send: who of them is heard."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import RecordDict

from sharding import Plan
from sharding.clients import Heard, Sampler
from sharding.clients.base import upload_coins
from sharding.clients.optimal import SecureOptimalSampler
from sharding.errors import UserError
from sharding.faults import find_misfit
from sharding.planner import Client
from train.engines import Update
from train.federate.messages import read_reply
from train.federate.reports import DRAW, TOTALS, UPLOAD, Report, read_draw, read_summands, reported_norm, wanted
from train.federate.vote import Vote

CLOSE = 1e-3  # how far, relatively, a reported norm may be from what the update has here: machines round differently


@dataclass
class Consultation:
    """A round whose nodes have trained and keep their updates.

    Attributes:
        exchange: sends each client a message of a kind; returns what they answer as read, and why others have not.
        sampler: says who is heard.
        plan: of the round.
        round: its number.
        lr: its step size.
        device: that the plan is on.
        failures: of the clients so far; more are added.
    """

    exchange: Callable[..., tuple[dict[Client, Any], dict[Client, str]]]
    sampler: Sampler
    plan: Plan
    round: int
    lr: float
    device: torch.device
    failures: dict[Client, str]

    def settle(self, reports: Mapping[Client, Report]) -> tuple[Heard, dict[Client, Update]]:
        """Return who is heard, and the updates of those."""
        if isinstance(self.sampler, SecureOptimalSampler):
            return self._by_totals(reports)
        return self._by_norms(reports)

    def _by_norms(self, reports: Mapping[Client, Report]) -> tuple[Heard, dict[Client, Update]]:
        """Let the sampler choose by the norms."""
        norms = {client: report.norm for client, report in reports.items() if report.norm is not None}
        self.failures |= {client: "its report has no norm" for client in reports if client not in norms}
        heard = self.sampler.hear(self.round, [int(client) for client in self.plan], norms)
        chosen = {client: wanted(self.plan[client].plan) for client in self.plan if client in heard.weights}

        def sound(client: Client, norm: float) -> None:
            if not abs(norm - norms[client]) <= CLOSE * norm:
                raise UserError(f"its update has a norm of {norm:.4g}, but it reported {norms[client]:.4g}")

        sent = self._ask(UPLOAD, chosen, read_reply)
        return heard, {client: sent[client] for client in self._measured(sent, sound)}

    def _by_totals(self, reports: Mapping[Client, Report]) -> tuple[Heard, dict[Client, Update]]:
        """Let the nodes find out who is heard, from totals over all of them."""
        vote, coins = Vote.open(self.sampler, self.plan, self.round, reports), self._coins()
        while vote.is_undecided:
            numbers = self._ask(TOTALS, vote.ballots(), read_summands)
            vote = vote.added(numbers) if len(numbers) == len(vote.sizes) else vote.among(numbers)

        def drawn(client: Client, norm: float) -> None:
            if not coins[int(client)] < vote.probability(client, norm):
                raise UserError("it sends an update, but by its norm and its coin it was not drawn")

        draws = self._ask(DRAW, vote.ballots(), read_draw)
        sent = {client: draw.update for client, draw in draws.items() if draw.update is not None}
        norms = self._measured(sent, drawn)
        return vote.close({c: draw.sums for c, draw in draws.items()}, norms), {c: sent[c] for c in norms}

    def _ask(
        self, kind: str, contents: Mapping[Client, RecordDict], read: Callable[[RecordDict], Any]
    ) -> dict[Client, Any]:
        answers, lost = self.exchange(kind, contents, read)
        self.failures |= lost
        return answers

    def _measured(self, sent: Mapping[Client, Update], check: Callable[[Client, float], None]) -> dict[Client, float]:
        """Return the norms of the updates that are of this plan, and pass; why others do not, is a failure."""
        norms = {}
        for client, update in sent.items():
            try:
                assert update.shard is not None
                shard = update.shard.to(self.device)
                misfit = find_misfit(self.plan[client], shard)
                if misfit is not None:
                    raise UserError(misfit)
                norms[client] = reported_norm(self.plan[client], shard, self.lr)
                check(client, norms[client])
            except UserError as why:
                norms.pop(client, None)
                self.failures[client] = str(why)
        return norms

    def _coins(self) -> list[float]:
        return upload_coins(self.sampler.seed, self.round, self.sampler.num_clients).tolist()
