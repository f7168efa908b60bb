"""Flower's strategy for spectral sharding: each node trains the singular terms that it can afford."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from sharding.errors import UserError, join_first, safe_repr
from sharding.flower.exchange import Exchange
from sharding.flower.messages import METRICS, NUMPY_FLOATS, part_of, unpack, weight_of
from sharding.flower.nodes import KeepRatio, Node, Nodes
from sharding.modules.wrappers import unwrap
from sharding.rng import generator
from sharding.rounds.failures import Failure, one_line
from sharding.rounds.plan import Client, Plan
from sharding.rounds.privacy.gaussian import Gaussian
from sharding.rounds.server import Server
from sharding.rounds.shard import Update
from sharding.validation import is_whole

log = logging.getLogger("flwr.sharding")  # Flower shows the lines of "flwr"

MetricsFunction = Callable[[list[RecordDict], str], MetricRecord]


class SpectralSharding(Strategy):
    """Run the rounds of `sharding.Server` in a Flower app.

    The model is the server's, and is trained in place. Shards are sent and updates are averaged one by one, so that
    memory does not grow with the number of nodes. A node that fails, leaves or is late is left out of its round: the
    log says why, and `failures` keeps it. The frozen part of a pretrained model is sent to each node once.

    To give each node a configuration, change that of its message in a subclass::

        def configure_train(self, server_round, arrays, config, grid):
            for message in super().configure_train(server_round, arrays, config, grid):
                message.content["config"]["lr"] = 0.1 / server_round
                yield message

    To resume an app, save `state_dict` after each round, for example in `evaluate_fn`, and load it before `start`.

    No other strategy may wrap this one, as those of Flower's differential privacy do. With ``Server(..., privacy=…)``
    each round's clients are drawn by the secret seed of the privacy, of all that may take part, connected or not, and
    the metrics of nodes are not averaged.

    Args:
        server: the server, with the model, the planner and the optimizer.
        keep_ratio: r of all nodes, or a function of a node's number. By default nodes report it: their app needs
            `query_message`.
        fraction_train: the share of nodes as in Flower's `FedAvg`, also the following; the planner's seed draws them.
        fraction_evaluate: the share of nodes that evaluate the largest terms of the model; 0 for none.
        min_train_nodes: the least number of nodes that train.
        min_evaluate_nodes: the least number of nodes that evaluate.
        min_available_nodes: the number of connected nodes to wait for.
        weighted_by_key: the metric that is a node's weight.
        train_metrics_aggr_fn: takes replies' records, without arrays, and the weight's key; by default each metric's
            weighted mean.
        evaluate_metrics_aggr_fn: the same function for the replies of an evaluation.

    Attributes:
        failures: the reasons why clients were left out of training or evaluation, by round from 1.

    Raises:
        UserError: `fraction_train` is outside (0, 1], or `fraction_evaluate` outside [0, 1]; or the server has privacy,
            and there is a fraction, a function of training metrics, a keep ratio, or a client without a whole number.
    """

    def __init__(
        self,
        server: Server,
        keep_ratio: KeepRatio | None = None,
        *,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        train_metrics_aggr_fn: MetricsFunction | None = None,
        evaluate_metrics_aggr_fn: MetricsFunction | None = None,
    ) -> None:
        if server.privacy is not None:
            if fraction_train != 1 or fraction_evaluate or train_metrics_aggr_fn or keep_ratio is not None:
                raise UserError(
                    "with privacy the server draws the nodes as its account says, and does not read their metrics: "
                    "pass fraction_evaluate=0.0, and leave out fraction_train, train_metrics_aggr_fn and keep_ratio, "
                    "which nodes report"
                )
            if strange := [safe_repr(client) for client in server.privacy.keep_ratios if not is_whole(client)]:
                raise UserError(
                    f"the keep ratios of privacy=Gaussian(…) have {join_first(strange)}; a client of a Flower app is a "
                    "node's partition-id: pass whole numbers, as in {0: 0.25, 1: 0.25}"
                )
        if not 0 < fraction_train <= 1:
            raise UserError(f"fraction_train is {fraction_train!r}; pass a number above 0 and at most 1")
        if not 0 <= fraction_evaluate <= 1:
            raise UserError(f"fraction_evaluate is {fraction_evaluate!r}; pass a number from 0 to 1")
        self.server = server
        self.fraction_train, self.fraction_evaluate = fraction_train, fraction_evaluate
        self.min_train_nodes, self.min_evaluate_nodes = min_train_nodes, min_evaluate_nodes
        self.min_available_nodes = min_available_nodes
        self.weighted_by_key = weighted_by_key
        self.train_metrics_aggr_fn = train_metrics_aggr_fn or weighted_means
        self.evaluate_metrics_aggr_fn = evaluate_metrics_aggr_fn or weighted_means
        self.failures: dict[int, dict[Client, Failure]] = {}
        self._keep_ratio = keep_ratio
        self._done = 0  # rounds
        self._before = 0  # rounds that were done before the start; Flower counts them again
        self._nodes: Nodes  # from the start
        self._plan: Plan | None = None  # of the present round; None without nodes
        self._exchange: Exchange  # from the start

    def summary(self) -> None:
        """Log the strategy's settings."""
        size = sum(parameter.numel() for parameter in self.server.model.parameters())
        log.info("\t├── Model: %d parameters", size)
        log.info("\t├── Terms: %d layers, seed %d", len(self.server.layers), self.server.planner.seed)
        log.info("\t├── Fraction: train (%.2f) | evaluate (%.2f)", self.fraction_train, self.fraction_evaluate)
        log.info("\t└── Minimum nodes: train (%d) | evaluate (%d)", self.min_train_nodes, self.min_evaluate_nodes)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds, as `flwr.serverapp.strategy.Strategy.start`.

        Args:
            grid: the app's grid.
            initial_arrays: the state of the server's model, if it is not the one that it has; not read after a round.
            num_rounds: the number of rounds in all: where some are done, the others are run, numbered on.
            timeout: seconds to wait for a round's replies once its shards are sent.
            train_config: the configuration for the nodes' training function.
            evaluate_config: the configuration for the nodes' function of evaluation.
            evaluate_fn: takes the round's number, from 0 for the first model, and the state of `server.result`.

        Returns:
            The state of `server.result`, and the metrics of the rounds that were run.

        Raises:
            UserError: all the rounds are done, the arrays are of another model, or with privacy no node may take part.
        """
        self._before = before = self._done
        if 0 < num_rounds <= before:
            raise UserError(
                f"{before} rounds are done; num_rounds is {num_rounds}, and counts them: pass a larger number"
            )
        if initial_arrays is not None and not before:
            self._load_model(initial_arrays.to_torch_state_dict(), "initial_arrays are")
            if self.server.averaged is not None:
                self.server.averaged.module.load_state_dict(unwrap(self.server.model).state_dict())
        self._nodes = Nodes(grid, self._keep_ratio)
        self._exchange = Exchange(self._nodes, timeout)

        def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            return evaluate_fn(server_round, arrays) if evaluate_fn and server_round >= before else None

        function = evaluate if evaluate_fn else None
        return super().start(
            self._exchange, self._arrays(), num_rounds, timeout, train_config, evaluate_config, function
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed app needs, for `torch.save`: the number of rounds, and model and server."""
        return {"round": self._done, "model": self.server.model.state_dict(), "server": self.server.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned: `start` continues after that round, with the draws that follow.

        Raises:
            UserError: the state is another one; or as `Server.load_state_dict`.
        """
        if missing := [name for name in ("round", "model", "server") if name not in state]:
            raise UserError(f"the state lacks {join_first(missing)}; pass what SpectralSharding.state_dict returned")
        self._load_model(state["model"], "the state is")
        self.server.load_state_dict(state["server"])
        self._done = state["round"]

    def _load_model(self, state: Mapping[str, Any], source: str) -> None:
        try:
            self.server.model.load_state_dict(state)
        except RuntimeError as error:
            raise UserError(f"{source} of another model: {one_line(error)}") from error

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return an iterator that makes the message of each sampled node, with its shard.

        The model is the server's; `arrays` is not read. A round that is done has no messages.

        Raises:
            UserError: another strategy runs the rounds.
        """
        if not isinstance(grid, Exchange):
            raise UserError(
                "another strategy runs the rounds of SpectralSharding, such as one of differential privacy, "
                "which cannot read shards; call the `start` of SpectralSharding, and give its Server "
                "privacy=sharding.Gaussian(…) for differential privacy"
            )
        if server_round <= self._before:
            log.info("configure_train: this round is done")
            self._plan = None
            return []
        nodes = self._sample("train", self.fraction_train, self.min_train_nodes, server_round)
        return self._messages(MessageType.TRAIN, nodes, self.server.plan, server_round - 1, server_round, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Average the updates as they arrive, and take the server's step.

        Returns:
            The state of `server.result` and the metrics; None where no update counts.
        """
        if self._plan is None:
            return None, None
        is_private, records = self.server.privacy is not None, dict[Client, RecordDict]()
        average = (self.server.average if is_private else self.server.average_as_reported)(self._plan)
        for client, answer in self._exchange.answers(replies, self._read_update):
            if isinstance(answer, Failure):
                average.add(client, answer)
            else:
                update, metrics = answer
                average.add(client, update, weight_of(metrics, self.weighted_by_key))
                records[client] = RecordDict({METRICS: metrics})
                del update
            del answer  # with its arrays
        outcome = self.server.step(average)
        self._done = server_round
        self._report(server_round, outcome.rejected)
        counts = len(outcome.accepted), len(outcome.rejected)
        log.info("aggregate_train: averaged %d updates, left out %d", *counts)
        if is_private:
            return self._arrays(), None
        if not outcome.accepted:
            return None, None
        accepted = [records[client] for client in outcome.accepted]
        return self._arrays(), self.train_metrics_aggr_fn(accepted, self.weighted_by_key)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return an iterator over messages as `configure_train`, with the largest terms of `server.result`."""
        if server_round <= self._before or self.fraction_evaluate == 0:
            return []
        nodes = self._sample("evaluate", self.fraction_evaluate, self.min_evaluate_nodes, server_round)
        plan = self.server.plan_evaluation
        return self._messages(MessageType.EVALUATE, nodes, plan, server_round, server_round, config)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the nodes' metrics, or None where no node answered."""
        records, failures = [], dict[Client, Failure]()
        for client, metrics in self._exchange.answers(replies, self._read_metrics):
            if isinstance(metrics, Failure):
                failures[client] = metrics
            else:
                records.append(RecordDict({METRICS: metrics}))
        self._report(server_round, failures)
        return self.evaluate_metrics_aggr_fn(records, self.weighted_by_key) if records else None

    def _sample(self, purpose: str, fraction: float, least: int, server_round: int) -> list[Node]:
        """Return the nodes that take part; wait until enough are connected, then a while for new ones."""
        needed = max(self.min_available_nodes, least, 1)

        def enough(nodes: dict[int, Node]) -> bool:
            if len(nodes) < needed:
                log.info("Waiting for nodes to connect: %d connected (minimum required: %d).", len(nodes), needed)
            return len(nodes) >= needed

        nodes = self._nodes.wait(enough)
        if self.server.privacy is not None:
            return self._drawn(self.server.privacy, nodes.values(), server_round)
        clients, count = sorted(nodes), max(int(len(nodes) * fraction), least)
        draws = generator(self.server.planner.seed, "nodes", purpose, server_round)
        log.info("configure_%s: Sampled %d nodes (out of %d)", purpose, count, len(nodes))
        return [nodes[clients[index]] for index in sorted(draws.choice(len(nodes), count, replace=False))]

    def _drawn(self, privacy: Gaussian, nodes: Iterable[Node], server_round: int) -> list[Node]:
        """Return the nodes of the clients that the mechanism draws of all that may take part; they may be none.

        Raise a UserError if no connected node may take part, so that the model would only get noise.
        """
        clients, draws = sorted(privacy.keep_ratios), generator(privacy.seed, "nodes", server_round)
        if privacy.sampling == "poisson":
            chosen = np.flatnonzero(draws.random(len(clients)) < privacy.per_round / len(clients))
        else:
            chosen = np.sort(draws.choice(len(clients), int(privacy.per_round), replace=False))
        present: dict[Client, Node] = {}
        for node in nodes:
            if (ratio := privacy.keep_ratios.get(node.client)) == node.keep_ratio:
                present[node.client] = node
            else:
                reported = node.client, node.keep_ratio, ratio
                log.warning("client %s is left out: its keep ratio is not that of the privacy (%s, not %s)", *reported)
        if not present:
            raise UserError(
                f"no connected node has the partition-id and the keep-ratio of one of {join_first(clients)} in the "
                "keep ratios of privacy=Gaussian(…), so that the model would only get noise; set both in --node-config"
            )
        return [present[clients[index]] for index in chosen if clients[index] in present]

    def _messages(
        self,
        kind: str,
        nodes: Sequence[Node],
        plan: Callable[[Mapping[Client, float], int], Plan],
        number: int,
        server_round: int,
        config: ConfigRecord,
    ) -> Iterable[Message]:
        """Plan the shards of these nodes, by a method of the server with this number, and return their messages."""
        if not nodes and self.server.privacy is None:  # with privacy, a round without nodes releases noise, too
            self._plan = None
            return []
        self._plan = plan({node.client: node.keep_ratio for node in nodes}, number)
        values, frozen = {**config, "server-round": server_round}, self.server.frozen
        return self._exchange.messages(kind, nodes, server_round, lambda _: values, self._plan, frozen)

    def _read_metrics(self, content: RecordDict) -> MetricRecord:
        """Return a reply's metrics, which have a valid weight."""
        metrics: MetricRecord = part_of(content, METRICS, MetricRecord)
        weight_of(metrics, self.weighted_by_key)
        return metrics

    def _read_update(self, content: RecordDict) -> tuple[Update, MetricRecord]:
        """Return a reply's update and metrics."""
        metrics = self._read_metrics(content)
        return unpack(Update, content), metrics

    def _report(self, server_round: int, failures: Mapping[Client, Failure]) -> None:
        for client, failure in failures.items():
            log.warning("client %s is left out of round %d: %s", client, server_round, failure)
        if failures:
            self.failures.setdefault(server_round, {}).update(failures)

    def _arrays(self) -> ArrayRecord:
        """Return the tensors of the result; NumPy lacks some types, such as bfloat16, which become float32."""
        state = {name: part for name, part in self.server.result.state_dict().items() if isinstance(part, Tensor)}
        unknown = [name for name, part in state.items() if part.is_floating_point() and part.dtype not in NUMPY_FLOATS]
        return ArrayRecord({**state, **{name: state[name].float() for name in unknown}})


def weighted_means(records: list[RecordDict], weighted_by_key: str) -> MetricRecord:
    """Return each metric's weighted mean over the nodes that report it; the weight is left out.

    A metric of other length than the first node's is logged and left out.
    """
    sums: dict[str, Tensor] = {}
    totals: dict[str, float] = {}
    for record in records:
        metrics: Mapping[str, Any] = record[METRICS]
        weight = metrics[weighted_by_key]
        for name, value in metrics.items():
            weighted = torch.tensor(value, dtype=torch.float64) * weight
            if name == weighted_by_key:
                continue
            if name in sums and sums[name].shape != weighted.shape:
                log.warning("left out a metric %r of shape %s", name, [*weighted.shape])
                continue
            sums[name] = sums[name] + weighted if name in sums else weighted
            totals[name] = totals.get(name, 0.0) + weight
    return MetricRecord({name: (value / totals[name]).tolist() for name, value in sums.items()})
