"""A strategy and a client's app in one process: what every reply comes to, and equal bits with `Server.round`."""

import copy
import importlib
import pickle
import sys
from dataclasses import replace
from io import BytesIO
from itertools import cycle
from math import inf, log, nan

import httpx
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import strategy as strategies
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from torch import nn
from torch.nn import functional as F

from models import build_model
from sharding import (
    Gaussian,
    Server,
    Shard,
    ShardPlanner,
    Update,
    UserError,
    client_model,
    clip_and_decay,
    factorize,
    init_empty,
    iterate_average,
)
from sharding.flower import SpectralSharding, train_message
from sharding.flower import exchange as exchange_module
from sharding.flower.messages import FROZEN, REST, SHAPES, content_of, metric_record, pack, settings, unpack
from sharding.flower.nodes import Nodes
from sharding.flower.strategy import weighted_means
from sharding.rounds.failures import FailureError, Kind
from tests.sharding.flower.grid import StubGrid, make_app
from tests.sharding.models import unchanged

RATIOS = {0: 0.25, 1: 0.5, 2: 0.5}
SIZES = {0: 20, 1: 40, 2: 10}


@pytest.fixture(autouse=True)
def _identity(monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    monkeypatch.setattr(exchange_module, "POLL", 0.0)
    monkeypatch.setattr("sharding.flower.nodes.sleep", lambda seconds: None)


def make_model():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def structure_of():
    with init_empty():
        return make_model()


def data_of(client):
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(SIZES[client], 8, generator=generator)
    return inputs, inputs[:, :4].argmax(1)


def fit(model, client, optimizer=torch.optim.AdamW):
    inputs, targets = data_of(client)
    steps = optimizer(model.parameters(), lr=0.01)
    steps.register_step_pre_hook(clip_and_decay(model))
    for batch in zip(inputs.split(10), targets.split(10), strict=True):
        steps.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        steps.step()
    return {"num-examples": SIZES[client], "train_loss": float(loss.detach())}


def train(model, config, context):
    return fit(model, context.node_config["partition-id"])


def evaluate(model, config, context):
    inputs, targets = data_of(context.node_config["partition-id"])
    with torch.no_grad():
        return {"num-examples": len(inputs), "accuracy": float((model(inputs).argmax(1) == targets).float().mean())}


def configs(first=1000):
    return {first - client: {"partition-id": client, "keep-ratio": ratio} for client, ratio in RATIOS.items()}


def grid_of(train, nodes=None, kind=StubGrid, **options):
    """A grid of these nodes, or of the three, that train with one function; others of a client's app by options."""
    return kind(make_app(structure_of(), train, **options), configs() if nodes is None else nodes)


def train_nothing(model, config, context):
    return {"num-examples": 1}


def server_of(planner="collective", **kwargs):
    torch.manual_seed(0)
    model = make_model()
    return Server(model, ShardPlanner(planner), torch.optim.SGD(model.parameters(), 0.5, momentum=0.5), **kwargs)


def run(server, grid=None, rounds=2, keep_ratio=None, **kwargs):
    grid = grid or grid_of(train, evaluate=evaluate)
    strategy = SpectralSharding(server, keep_ratio, **{"fraction_evaluate": 0.0, **kwargs})
    return strategy, strategy.start(grid, num_rounds=rounds, timeout=0.0), grid


def here(server, fit=fit):
    """A client's training for `Server.round`, without messages."""

    def train(client, shard):
        model = client_model(structure_of(), shard, frozen=server.frozen if len(server.frozen) else None)
        fit(model, client)
        return shard.read_from(model)

    return train


def assert_equal(one, other):
    """Two states have the same bits."""
    torch.testing.assert_close(dict(one), dict(other), rtol=0, atol=0)


def trained(grid):
    """The nodes that were sent a shard to train, in this order."""
    return [node for node, kind, _ in grid.pushed if kind == "train"]


def given_frozen(grid):
    """The nodes and kinds of the messages with the frozen part."""
    return [(node, kind) for node, kind, content in grid.pushed if FROZEN in content]


def kinds(failures):
    return {client: failure.kind for client, failure in failures.items()}


@pytest.fixture
def clock(monkeypatch):
    """The time of the nodes' reports, in the first entry."""
    now = [0.0]
    monkeypatch.setattr("sharding.flower.nodes.monotonic", lambda: now[0])
    return now


def test_import_without_flower_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "sharding.flower")
    with pytest.raises(ImportError, match=r"needs the package flwr: pip install 'spectral-sharding\[flower\]'"):
        importlib.import_module("sharding.flower")


@pytest.mark.parametrize(
    ("make_server", "compression", "first"),
    [
        (lambda: server_of(), "float32", 1000),
        (lambda: server_of(), "int8", 77),
        (lambda: server_of(max_share=0.4), "float32", 1000),
        (lambda: server_of(max_share=0.4), "int8", 1000),
        (lambda: frozen_server(), "float32", 1000),
    ],
    ids=["plain", "int8 on other numbers", "capped", "capped int8", "residual"],
)
def test_strategy_with_adamw_on_nodes_equals_server_round(make_server, compression, first):
    ours, theirs = make_server(), make_server()
    ours.planner.compression = theirs.planner.compression = compression
    _, result, _ = run(ours, grid_of(train, configs(first)), rounds=3)
    for number in range(3):
        theirs.round(number, RATIOS, here(theirs), SIZES)
    assert_equal(ours.model.state_dict(), theirs.model.state_dict())
    assert_equal(result.arrays.to_torch_state_dict(), theirs.model.state_dict())


@pytest.mark.parametrize(("strategy", "clips"), [("prism_wallenius", False), ("prism_wallenius_clip", True)])
def test_nodes_clip_as_the_strategy_does(strategy, clips):
    ours, theirs = server_of(strategy), server_of(strategy)
    ours.planner.clip = theirs.planner.clip = 1.5 if clips else ours.planner.clip
    given = []

    def hooked(model, client, clip=1.5 if clips else None):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(clip_and_decay(model, clip, 0))
        inputs, targets = data_of(client)
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        return {"num-examples": SIZES[client]}

    def train_there(model, config, context):
        given.append(config["clip"])
        return hooked(model, context.node_config["partition-id"], config["clip"])

    run(ours, grid_of(train_there), rounds=1)
    theirs.round(0, RATIOS, here(theirs, hooked), SIZES)
    assert given == [1.5 if clips else inf] * len(RATIOS)
    assert_equal(ours.model.state_dict(), theirs.model.state_dict())


@pytest.mark.parametrize("averages", [False, True])
def test_strategy_shards_the_layers_that_the_server_chose_once(averages, monkeypatch):
    server = server_of()
    server.averaged = iterate_average(server.model) if averages else None
    for method in ("checked_layers", "sharded_layers"):
        monkeypatch.setattr(ShardPlanner, method, None)
    _, result, _ = run(server, fraction_evaluate=1.0)
    assert result.evaluate_metrics_clientapp.keys() == {1, 2}


def test_keep_ratio_as_a_function_asks_no_node():
    seen = []

    def ratio(node):
        seen.append(node)
        return 0.5

    _, _, grid = run(server_of(), keep_ratio=ratio)
    assert sorted(seen) == sorted(configs())
    assert {kind for _, kind, _ in grid.pushed} == {"train"}


def test_server_keeps_one_message_at_a_time():
    grid = grid_of(train_nothing, {node: {} for node in range(1, 13)})
    run(server_of(), grid, rounds=1, keep_ratio=0.5)
    assert grid.most <= 3  # the content at hand, the one before it, and what a node has received


def failing(kind):
    def train_or_fail(model, config, context):
        if context.node_config["partition-id"] != 1:
            return train(model, config, context)
        if kind == "raises":
            raise RuntimeError("disk full")
        if kind == "diverges":
            with torch.no_grad():
                next(model.parameters()).fill_(nan)
        if kind == "has no weight":
            return {"loss": 1.0}
        return {"num-examples": 0 if kind == "trained nothing" else 40}

    return train_or_fail


@pytest.mark.parametrize(
    ("kind", "reason", "of_kind"),
    [
        ("raises", "disk full", Kind.FAILED),
        ("diverges", "NaN or Inf", Kind.NOT_FINITE),
        ("has no weight", "'num-examples' is None", Kind.MALFORMED),
        ("trained nothing", "'num-examples' is 0", Kind.MALFORMED),
        ("is silent", "no reply within 0 s", Kind.LATE),
    ],
)
def test_failed_node_is_left_out_with_its_reason(caplog, kind, reason, of_kind):
    caplog.set_level("WARNING", "flwr.sharding")
    server, missing, grid = server_of(), server_of(), grid_of(failing(kind))
    if kind == "is silent":
        grid.bend[999] = lambda reply: [reply] if "node" in reply.content else []
    strategy, result, _ = run(server, grid, rounds=1)
    assert strategy.failures[1][1].kind == of_kind
    assert reason in str(strategy.failures[1][1])
    assert f"client 1 is left out of round 1: {strategy.failures[1][1]}" in caplog.text
    assert "train_loss" in result.train_metrics_clientapp[1]
    fit_here = here(missing)
    missing.round(0, RATIOS, lambda client, shard: None if client == 1 else fit_here(client, shard), SIZES)
    assert_equal(server.model.state_dict(), missing.model.state_dict())


def test_error_of_a_nodes_torch_has_the_remedy():
    request = Message(RecordDict(), dst_node_id=1, message_type="train")
    error = Error(2, "<class 'ValueError'>:<'Expected more than 1 value per channel when training'>")
    with pytest.raises(
        FailureError, match=r"error 2: .*Expected more.*\(a batch norm cannot train on .*drop_last=True"
    ):
        content_of(Message(error, reply_to=request))


@pytest.mark.parametrize("unreadable", ["query", "train"])
def test_reply_that_flower_cannot_read_is_of_one_node_only(caplog, unreadable):
    class Hostile(StubGrid):
        def pull_messages(self, numbers):
            for reply in super().pull_messages(numbers):
                if (reply.metadata.message_type, reply.metadata.src_node_id) == (unreadable, 999):
                    raise AttributeError("'list' object has no attribute 'items'")
                yield reply

    strategy, _, grid = run(server_of(), grid_of(train, kind=Hostile), rounds=1)
    assert "Flower cannot read its reply (AttributeError: 'list' object" in caplog.text
    assert kinds(strategy.failures.get(1, {})) == ({1: Kind.MALFORMED} if unreadable == "train" else {})
    assert (999 in trained(grid)) == (unreadable == "train")


def test_superlink_that_cannot_be_reached_ends_the_run():
    class Unreachable(StubGrid):
        def pull_messages(self, numbers):
            raise httpx.ConnectError("connection refused")

    with pytest.raises(httpx.ConnectError):
        run(server_of(), grid_of(train, kind=Unreachable), keep_ratio=0.5)


def test_reply_of_another_node_is_ignored(caplog):
    def signed_by_another(reply):
        if reply.metadata.message_type == "train":
            reply.metadata.__dict__["_src_node_id"] = 1000
        return [reply]

    grid = grid_of(train)
    grid.bend[999] = signed_by_another
    strategy, _, _ = run(server_of(), grid, rounds=1)
    assert kinds(strategy.failures[1]) == {1: Kind.LATE}
    assert "ignored an unrequested reply from node 1000" in caplog.text


def test_replies_count_even_if_sending_takes_longer_than_the_timeout():
    expiry = {}

    class Slow(StubGrid):  # sends a message in ten seconds; what has expired has no reply
        def push_messages(self, messages):
            (number,) = super().push_messages(messages)
            expiry[number] = 10 * len(expiry) + messages[0].metadata.ttl
            return [number]

        def pull_messages(self, numbers):
            return super().pull_messages(number for number in numbers if expiry[number] > 10 * len(expiry))

    strategy, _, _ = run(server_of(), grid_of(train, kind=Slow), rounds=1, keep_ratio=0.5)
    assert strategy.failures == {}


def test_round_without_updates_keeps_the_model():
    server = server_of()
    before = copy.deepcopy(server.model.state_dict())
    _, result, _ = run(server, grid_of(lambda model, config, context: {}))
    assert result.train_metrics_clientapp == {}
    assert_equal(server.model.state_dict(), before)


def test_second_node_of_a_partition_waits_for_the_first_to_leave(caplog):
    nodes = configs() | {2000: {"partition-id": 1, "keep-ratio": 0.5}}

    def leave(model, config, context):
        if config["server-round"] == 2:
            grid.settings.pop(999, None)
        return train(model, config, context)

    grid = grid_of(leave, nodes)
    strategy, _, _ = run(server_of(), grid, rounds=3)
    assert "node 2000 waits: its partition-id is 1, as that of node 999" in caplog.text
    assert strategy.failures == {}
    assert trained(grid) == [1000, 999, 998, 1000, 999, 998, 1000, 2000, 998]


def test_node_without_keep_ratio_is_left_out(caplog):
    run(server_of(), grid_of(train, configs() | {2000: {"partition-id": 3}}))
    assert "keep-ratio is None in --node-config" in caplog.text


def test_node_whose_report_fails_is_asked_again_after_a_minute(clock):
    grid = grid_of(train, configs() | {999: {"partition-id": 1}})
    nodes = Nodes(grid)
    assert sorted(nodes.connected()) == [0, 2]
    grid.settings[999] = configs()[999]
    for clock[0], clients in ((59.0, [0, 2]), (60.0, [0, 1, 2])):
        assert sorted(nodes.connected()) == clients


def test_node_whose_report_is_lost_is_asked_again_but_no_round_waits_twice(clock):
    grid = grid_of(train)
    nodes = Nodes(grid)
    grid.bend[999] = lambda reply: []
    seen = []
    for clock[0] in (0.0, 59.0, 60.0, 600.0):
        seen.append((sorted(nodes.connected()), nodes.waits))
    assert seen == [([0, 2], True), ([0, 2], True), ([0, 2], False), ([0, 2], False)]
    del grid.bend[999]
    clock[0] = 1200.0
    assert sorted(nodes.connected()) == [0, 1, 2]
    assert [node for node, _, _ in grid.pushed] == [998, 999, 1000, 999, 999]


def frozen_server():
    torch.manual_seed(0)
    model = make_model()
    model[0].bias.requires_grad_(False)
    return Server(factorize(model, 0.25, residual_format="int8"), ShardPlanner("top_n"))


def test_residual_is_sent_once_to_each_node():
    strategy, result, grid = run(frozen_server(), rounds=3, fraction_evaluate=1.0)
    assert strategy.failures == {}
    assert result.evaluate_metrics_clientapp.keys() == {1, 2, 3}
    assert given_frozen(grid) == [(node, "train") for node in (1000, 999, 998)]


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
def test_node_that_lost_its_residual_gets_it_again_in_the_same_round(purpose):
    def forgetting(function):
        def run(model, config, context):
            if (config["server-round"], context.node_config["partition-id"]) == (1, 1):
                grid.states.pop(999, None)
            return function(model, config, context)

        return run

    states = []
    for forgets in (False, True):
        # What is lost after training in round 1 is missed in its evaluation, and what is lost then in round 2.
        functions = [train, forgetting(evaluate)] if purpose == "train" else [forgetting(train), evaluate]
        fit, test = functions if forgets else (train, evaluate)
        grid = grid_of(fit, evaluate=test)
        server = frozen_server()
        strategy, result, _ = run(server, grid, rounds=2, fraction_evaluate=1.0)
        assert strategy.failures == {}
        states.append((server.model.state_dict(), result.evaluate_metrics_clientapp))
    assert_equal(states[0][0], states[1][0])
    assert states[0][1] == states[1][1]
    assert given_frozen(grid) == [(1000, "train"), (999, "train"), (998, "train"), (999, purpose)]


def test_subclass_gives_each_node_a_configuration_also_when_it_is_sent_again():
    class Configured(SpectralSharding):
        def configure_train(self, server_round, arrays, config, grid):
            for number, message in enumerate(super().configure_train(server_round, arrays, config, grid)):
                message.content["config"]["lr"] = 0.1 * number + server_round
                yield message

    seen = []

    def forget(model, config, context):
        seen.append((context.node_config["partition-id"], dict(config)))
        grid.states.pop(context.node_id)
        return {"num-examples": 1}

    grid = grid_of(forget)
    strategy = Configured(frozen_server(), fraction_evaluate=0.0)
    strategy.start(grid, num_rounds=2, timeout=0.0, train_config=ConfigRecord({"b": 2}))
    assert seen == [
        (client, {"b": 2, "server-round": number, "lr": 0.1 * client + number, "clip": 10.0})
        for number in (1, 2)
        for client in (0, 1, 2)
    ]


def test_node_that_always_lacks_the_residual_is_left_out():
    def train_or_lack(model, config, context):
        raise UserError("this node lacks the frozen part of the model")

    strategy, _, grid = run(frozen_server(), grid_of(train_or_lack), rounds=1)
    assert kinds(strategy.failures[1]) == dict.fromkeys(RATIOS, Kind.FAILED)
    assert len(trained(grid)) == 2 * len(RATIOS)


@pytest.mark.parametrize("fault", ["fails", "is late"])
def test_residual_is_sent_once_to_a_node_without_a_valid_reply(fault):
    def train_or_fail(model, config, context):
        if context.node_id == 999 and fault == "fails":
            raise MemoryError("batch too large")
        return train(model, config, context)

    grid = grid_of(train_or_fail)
    if fault == "is late":
        grid.bend[999] = lambda reply: []
    strategy, _, _ = run(frozen_server(), grid, rounds=3, keep_ratio=0.5)
    assert [list(failed) for failed in strategy.failures.values()] == [[999]] * 3
    assert given_frozen(grid) == [(node, "train") for node in (998, 999, 1000)]


def test_residual_that_flower_did_not_accept_is_sent_again():
    class Full(StubGrid):
        full = True

        def push_messages(self, messages):
            if self.full and messages[0].metadata.dst_node_id == 999:
                self.full = False
                return []
            return super().push_messages(messages)

    strategy, _, grid = run(frozen_server(), grid_of(train, kind=Full), keep_ratio=0.5)
    assert {
        number: {node: str(failure) for node, failure in each.items()} for number, each in strategy.failures.items()
    } == {1: {999: "Flower did not accept the message to it, see the log"}}
    assert given_frozen(grid) == [(node, "train") for node in (998, 1000, 999)]


def test_spoiled_residual_in_a_nodes_state_is_sent_again():
    def spoil(model, config, context):
        data = context.state[FROZEN][FROZEN]
        context.state[FROZEN] = ConfigRecord({FROZEN: data[:-1] + bytes([data[-1] ^ 1])})
        return train(model, config, context)

    strategy, _, grid = run(frozen_server(), grid_of(spoil))
    assert strategy.failures == {}
    assert given_frozen(grid) == [(node, "train") for node in (1000, 999, 998)] * 2


def test_evaluation_on_nodes_is_the_weighted_mean_of_their_models():
    server = server_of("top_n")
    _, result, _ = run(server, rounds=1, fraction_evaluate=1.0)
    plan = ShardPlanner("top_n").plan(server.model, RATIOS, 1)
    each = {}
    for client, shard in plan.shards():
        inputs, targets = data_of(client)
        each[client] = float((client_model(structure_of(), shard)(inputs).argmax(1) == targets).float().mean())
    mean = sum(SIZES[client] * each[client] for client in RATIOS) / sum(SIZES.values())
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("strategy", "tail", "share"), [("collective", "int4", 0), ("top_n", None, 0), ("top_n", "int4", 0.5)]
)
def test_evaluation_gives_nodes_the_tail_that_they_train_with(strategy, tail, share):
    def count_tails(model, config, context):
        return {"num-examples": 1, "tails": sum(name.endswith("tail") for name, _ in model.named_buffers())}

    nodes = {9: {"partition-id": 0, "keep-ratio": 0.25}, 8: {"partition-id": 1, "keep-ratio": 0.5}}
    server = Server(make_model(), ShardPlanner(strategy, tail_format=tail))
    _, result, _ = run(server, grid_of(train, nodes, evaluate=count_tails), rounds=1, fraction_evaluate=1.0)
    assert result.evaluate_metrics_clientapp[1]["tails"] == share


def test_fraction_train_samples_by_the_planners_seed():
    nodes = {node: {"partition-id": node, "keep-ratio": 0.5} for node in range(1, 11)}
    one, other = (
        trained(run(server_of(), grid_of(train_nothing, nodes), rounds=4, fraction_train=0.3)[2]) for _ in range(2)
    )
    assert one == other
    assert len(one) == 12
    assert len({*one}) > 3


@pytest.mark.parametrize("averages", [False, True])
def test_resumed_app_equals_one_that_was_not_stopped(averages):
    def start(rounds, state=None):
        seen, tested = [], []

        def keep(model, config, context):
            seen.append((config["server-round"], context.node_config["partition-id"]))
            return fit(model, seen[-1][1])

        server = server_of()
        server.averaged = iterate_average(server.model) if averages else None
        strategy = SpectralSharding(server, fraction_train=0.7, fraction_evaluate=0.4, min_evaluate_nodes=1)
        if state is not None:
            strategy.load_state_dict(state)
        grid = grid_of(keep, evaluate=evaluate)
        result = strategy.start(
            grid, num_rounds=rounds, timeout=0.0, evaluate_fn=lambda number, arrays: tested.append(number)
        )
        torch.save(strategy.state_dict(), file := BytesIO())
        file.seek(0)
        return torch.load(file, weights_only=True), result, seen, tested

    whole, result, seen, tested = start(4)
    half, _, first, _ = start(2)
    resumed, later, second, again = start(4, half)
    assert first + second == seen
    assert (tested, again) == ([0, 1, 2, 3, 4], [2, 3, 4])
    assert [*later.train_metrics_clientapp] == [*later.evaluate_metrics_clientapp] == [3, 4]
    for number in (3, 4):
        assert later.train_metrics_clientapp[number] == result.train_metrics_clientapp[number]
        assert later.evaluate_metrics_clientapp[number] == result.evaluate_metrics_clientapp[number]
    assert resumed["round"] == whole["round"] == 4
    for part in ("model", "server"):
        assert_equal(resumed[part], whole[part])


def test_second_start_continues_or_is_refused():
    server, grid = server_of(), grid_of(train)
    strategy = SpectralSharding(server, fraction_evaluate=0.0)
    strategy.start(grid, num_rounds=1, timeout=0.0)
    strategy.start(grid, ArrayRecord(make_model().state_dict()), num_rounds=3, timeout=0.0)
    with pytest.raises(UserError, match="3 rounds are done; num_rounds is 3"):
        strategy.start(grid, num_rounds=3, timeout=0.0)
    theirs = server_of()
    run(theirs, rounds=3)
    assert_equal(server.model.state_dict(), theirs.model.state_dict())


def test_state_of_something_else_is_refused():
    server = server_of()
    with pytest.raises(UserError, match=r"lacks round, model, server; pass what SpectralSharding\.state_dict"):
        SpectralSharding(server).load_state_dict(server.state_dict())


@pytest.mark.parametrize("side", ["Client", "Server"])
@pytest.mark.parametrize("clipping", [{"Fixed": 1.0}, {"Adaptive": None}], ids=lambda clipping: next(iter(clipping)))
def test_strategy_in_one_of_differential_privacy_is_refused(side, clipping):
    ((kind, norm),) = clipping.items()
    wrapper = getattr(strategies, f"DifferentialPrivacy{side}Side{kind}Clipping")
    settings = {} if norm is None else {"clipping_norm": norm}
    strategy, grid = SpectralSharding(server_of()), grid_of(train)
    for _ in range(2):
        wrapped = wrapper(strategy, noise_multiplier=0.1, num_sampled_clients=3, **settings)
        with pytest.raises(UserError, match="differential privacy, which cannot read shards"):
            wrapped.start(grid, ArrayRecord(make_model().state_dict()), num_rounds=1)
        strategy.start(grid, num_rounds=0)  # what a start leaves behind does not hide the wrapper
    assert grid.pushed == []


def private_server(sampling="poisson"):
    torch.manual_seed(0)
    privacy = Gaussian(
        clipping_norm=0.5, noise_multiplier=2.0, keep_ratios=RATIOS, per_round=1.0, sampling=sampling, seed=1
    )
    return Server(make_model(), ShardPlanner("top_n"), privacy=privacy)


@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_nodes_receive_the_noisy_model_of_a_server_with_privacy(sampling):
    server, models, received, rounds = private_server(sampling=sampling), [], {}, []

    def keep(model, config, context):
        rounds.append(config["server-round"])
        received[config["server-round"]] = model[0].weight.detach().clone()  # which is sent whole, and does not change
        return {"num-examples": 1, "secret": 1.0}

    def note(number, arrays):
        models.append(arrays.to_torch_state_dict()["0.weight"])

    strategy = SpectralSharding(server, fraction_evaluate=0.0)
    result = strategy.start(grid_of(keep), num_rounds=12, timeout=0.0, evaluate_fn=note)
    assert result.train_metrics_clientapp == {}
    assert all(torch.equal(received[number], models[number - 1]) for number in received)
    counts = [rounds.count(number) for number in range(1, 13)]
    assert {*counts} == ({1} if sampling == "fixed" else {0, 1, 2})
    steps = torch.stack(models).diff(dim=0)  # each round adds noise, also one without a node
    torch.testing.assert_close(steps.std((1, 2)), torch.full((12,), 2.0 * 0.5), rtol=0.2, atol=0)


def test_rounds_with_privacy_equal_those_of_the_server():
    ours, theirs = private_server(sampling="fixed"), private_server(sampling="fixed")
    _, _, grid = run(ours, rounds=1)
    drawn = [configs()[node]["partition-id"] for node in trained(grid)]
    theirs.round(0, {client: RATIOS[client] for client in drawn}, here(theirs))
    assert_equal(ours.model.state_dict(), theirs.model.state_dict())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fraction_train": 0.5, "fraction_evaluate": 0.0},
        {"fraction_evaluate": 0.0, "train_metrics_aggr_fn": weighted_means},
        {"fraction_evaluate": 0.0, "keep_ratio": 0.25},
    ],
)
def test_metrics_and_fractions_with_privacy_are_refused(options):
    with pytest.raises(UserError, match=r"pass fraction_evaluate=0\.0, and leave out fraction_train"):
        SpectralSharding(private_server(), **options)


def test_node_with_another_keep_ratio_than_in_the_privacy_is_left_out(caplog):
    nodes = configs() | {999: {"partition-id": 1, "keep-ratio": 0.1}}
    _, _, grid = run(private_server(), grid_of(train, nodes), rounds=6)
    assert "client 1 is left out: its keep ratio is not that of the privacy" in caplog.text
    assert {*trained(grid)} == {1000, 998}


@pytest.mark.parametrize("clients", [["hospital 0", "hospital 1"], [0, "hospital 1"], [True, 0.5]])
def test_client_of_the_privacy_that_is_no_partition_is_refused(clients):
    privacy = replace(private_server().privacy, keep_ratios=dict.fromkeys(clients, 0.25))
    server = Server(make_model(), ShardPlanner("top_n"), privacy=privacy)
    with pytest.raises(UserError, match="a client of a Flower app is a node's partition-id: pass whole numbers"):
        SpectralSharding(server, fraction_evaluate=0.0)


@pytest.mark.parametrize(
    "nodes",
    [
        {998: {"keep-ratio": 0.25}, 999: {"keep-ratio": 0.5}},
        {node: {"partition-id": node + 1000, "keep-ratio": 0.5} for node in (1, 2)},
        {node: {"partition-id": node, "keep-ratio": 0.1} for node in (1, 2)},
    ],
    ids=["no partitions", "other partitions", "other ratios"],
)
def test_private_round_without_any_node_of_its_clients_raises(nodes):
    server = private_server()
    before = copy.deepcopy(server.model.state_dict())
    with pytest.raises(UserError, match=r"no connected node has the partition-id and the keep-ratio of one of 0, 1, 2"):
        run(server, grid_of(train, nodes))
    assert_equal(server.model.state_dict(), before)


C = 0.05  # the clipping norm: below that of any change
SIGMA = 0.25 * (2 * log(1.25e5)) ** 0.5  # of a `LocalDpMod` with a sensitivity of 0.25, and (1, 1e-5)


@pytest.mark.parametrize("make_server", [lambda: server_of("top_n"), lambda: frozen_server()], ids=["plain", "frozen"])
@pytest.mark.parametrize(
    ("mod", "sigma"), [(fixedclipping_mod, 0), (adaptiveclipping_mod, 0), (LocalDpMod(C, 0.25, 1.0, 1e-5), SIGMA)]
)
def test_server_averages_what_a_mod_of_the_nodes_makes_of_their_updates(mod, sigma, make_server):
    np.random.seed(0)  # noqa: NPY002 - the noise of Flower's mod comes from there
    ours, theirs, sent = make_server(), make_server(), make_server()
    grid, received, rest = grid_of(train, mods=[mod]), {}, {}

    def note(reply):
        if "arrays" in reply.content:
            client = configs()[reply.metadata.src_node_id]["partition-id"]
            received[client], rest[client] = unpack(Update, reply.content), reply.content["config"]
        return [reply]

    grid.bend = dict.fromkeys(configs(), note)
    strategy = SpectralSharding(ours, fraction_evaluate=0.0)
    result = strategy.start(grid, num_rounds=1, timeout=0.0, train_config=ConfigRecord({"clipping_norm": C}))
    assert strategy.failures == {}
    if mod is adaptiveclipping_mod:
        assert result.train_metrics_clientapp[1]["norm_bit"] == 1
    theirs.round(0, RATIOS, lambda client, shard: received[client], SIZES)
    assert_equal(ours.model.state_dict(), theirs.model.state_dict())
    noise = []
    for client, shard in sent.plan(RATIOS, 0).shards():
        assert rest[client] == pack(unchanged(shard))["config"]  # tells nothing of the node's data
        whole, before = here(sent)(client, shard).trained(), shard.trained()
        changes = {name: whole[name] - before[name] for name in whole}
        norm = float(torch.cat([change.flatten() for change in changes.values()]).norm())
        assert norm > 2 * C
        after = received[client].trained()
        noise += [(after[name] - before[name] - changes[name] * C / norm).flatten() for name in changes]
    if sigma:
        assert float(torch.cat(noise).std()) == pytest.approx(sigma, rel=0.05)
    else:
        torch.testing.assert_close(torch.cat(noise), torch.zeros_like(torch.cat(noise)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("train", "compression", "message"),
    [
        (train, "int8", "it needs weights in float32 and compression"),
        (train_nothing, "float32", "ZeroDivisionError"),  # an update without a change cannot be clipped by Flower
    ],
    ids=["compressed", "unchanged"],
)
def test_failure_of_a_mod_names_the_reason(train, compression, message):
    server = server_of()
    server.planner.compression = compression
    strategy, _, _ = run(server, grid_of(train, mods=[LocalDpMod(1.0, 1.0, 1.0, 1e-5)]), rounds=1)
    assert len(strategy.failures[1]) == 3
    assert all(message in str(each) for each in strategy.failures[1].values())


@pytest.mark.parametrize(
    ("dtypes", "compression"),
    [(dtypes, "float32") for dtypes in ("float32", "float64", "float16", "bfloat16", "float16 float32 float64")]
    + [("float32", "bfloat16"), ("float32", "int8"), ("float16 float32 float64", "int8")],
)
def test_unpack_returns_what_was_packed(dtypes, compression):
    model = make_model()
    for layer, dtype in zip(model[::2], cycle(dtypes.split()), strict=False):
        layer.to(getattr(torch, dtype))
    model[0].bias.requires_grad_(False)
    model.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    plan = ShardPlanner("top_n", compression=compression).plan(model, RATIOS)
    for shard in (plan.shard(0), plan.shard(2)):
        for part in (shard, unchanged(shard)):
            content = RecordDict(pack(part, {"lr": 0.1}))
            assert dict(settings(content["config"])) == {"lr": 0.1}
            assert unpack(type(part), content).to_bytes() == part.to_bytes()
            is_packed = compression != "float32" or dtypes == "bfloat16"
            assert [*content["arrays"]] == (["packed"] if is_packed else sorted(dtypes.split()))


@pytest.mark.parametrize("change", ["shorter", "another name", "no names", "other names", "an object", "bytes"])
def test_arrays_that_do_not_fit_raise(change):
    records = pack(server_of().plan(RATIOS, 0).shard(0))
    arrays, config = records["arrays"], records["config"]
    vector = arrays["float32"].numpy()
    match change:
        case "shorter":
            arrays["float32"] = Array(vector[1:])
        case "another name":
            arrays["float64"] = arrays.pop("float32")
        case "no names":
            del config[SHAPES]
        case "other names":
            config[SHAPES] = config[SHAPES].replace("terms/2/u", "terms/2/w")
        case "an object":
            arrays["float32"] = Array("float32", (1,), "numpy.ndarray", pickle.dumps(vector))
        case "bytes":
            del config[REST]
    with pytest.raises(UserError, match=r"do not fit their names and shapes|where a shard is needed|lacks 'u'"):
        unpack(Shard, RecordDict(records))


def test_message_takes_no_more_bytes_than_the_wire_form_of_a_shard():
    """The quickstart's model at r = 0.1: an array for each tensor would take 16 % more, in 53 objects."""
    model = build_model("resnet18_gn", input_shape=(1, 8, 8), num_classes=10, width=16, blocks=(1, 1, 1), groups=4)
    shard = ShardPlanner("top_n").plan(model, {0: 0.1}, 0).shard(0)
    objects = get_all_nested_objects(RecordDict(pack(shard)))  # as Flower sends them
    assert len(objects) == 5
    assert sum(len(each.deflate()) for each in objects.values()) < shard.nbytes


def test_metrics_become_numbers_that_flower_takes():
    given = {
        "num-examples": np.int64(3),
        "a": np.float32(0.5),
        "b": torch.tensor(2.0, requires_grad=True),
        "c": torch.tensor(True),
        "d": np.bool_(False),
        "e": True,
        "f": np.array([1, 2]),
        "g": [torch.tensor(1.0), 2.0],
        "h": np.array(4),
        "i": torch.tensor(0.5, dtype=torch.bfloat16),
    }
    record = metric_record(given)
    assert dict(record) == {
        "num-examples": 3, "a": 0.5, "b": 2.0, "c": 1, "d": 0, "e": 1, "f": [1, 2], "g": [1.0, 2.0], "h": 4, "i": 0.5
    }  # fmt: skip
    assert [type(value) for value in record.values()] == [int, float, float, int, int, int, list, list, int, float]


@pytest.mark.parametrize("value", [None, "much", 1j, {"a": 1}, torch.ones(2, 2), [1, 2.0]])
def test_metric_that_is_no_number_is_named(value):
    with pytest.raises(UserError, match=r"the metric 'loss' is .*; return a number or a list of numbers"):
        metric_record({"num-examples": 1, "loss": value})


@pytest.mark.parametrize("returned", [None, 3, (0.5, 10, {})])
def test_function_that_returns_no_metrics_is_a_clear_failure(returned):
    strategy, _, _ = run(server_of(), grid_of(lambda *_: returned), rounds=1)
    assert all(f"a client's function returned {returned}" in str(failure) for failure in strategy.failures[1].values())


@pytest.mark.parametrize(
    ("name", "value"),
    [("fraction_train", value) for value in (-1.0, 0.0, 1.5, nan)]
    + [("fraction_evaluate", value) for value in (-1.0, 1.5, nan)],
)
def test_impossible_fraction_is_refused(name, value):
    with pytest.raises(UserError, match=f"{name} is {value}; pass a number"):
        SpectralSharding(server_of(), **{name: value})


def test_evaluate_fn_gets_the_state_of_each_round():
    server, states = server_of(), []

    def note(number, arrays):
        states.append((number, arrays.to_torch_state_dict()))

    strategy = SpectralSharding(server, fraction_evaluate=0.0)
    strategy.start(grid_of(train), num_rounds=2, timeout=0.0, evaluate_fn=note)
    assert [number for number, _ in states] == [0, 1, 2]
    assert_equal(states[2][1], server.model.state_dict())
    assert not torch.equal(states[0][1]["2.weight"], states[1][1]["2.weight"])


def test_initial_arrays_are_those_of_the_average_too():
    model, other, states = make_model(), make_model(), []
    server = Server(model, ShardPlanner("top_n"), averaged=iterate_average(model))
    strategy = SpectralSharding(server, fraction_evaluate=0.0)

    def note(number, arrays):
        states.append(arrays.to_torch_state_dict())

    strategy.start(grid_of(train), ArrayRecord(other.state_dict()), num_rounds=1, timeout=0.0, evaluate_fn=note)
    assert_equal(states[0], other.state_dict())
    assert_equal(states[1], model.state_dict())


@pytest.mark.parametrize("state", [nn.Linear(2, 2).state_dict(), {"0.weight": torch.ones(1)}])
def test_arrays_and_state_of_another_model_are_refused(state):
    strategy = SpectralSharding(server_of(), fraction_evaluate=0.0)
    with pytest.raises(UserError, match="initial_arrays are of another model: Error"):
        strategy.start(StubGrid(None, {}), ArrayRecord(state))
    with pytest.raises(UserError, match="the state is of another model: Error"):
        strategy.load_state_dict(strategy.state_dict() | {"model": state})


def test_extra_state_is_not_among_the_arrays():
    class Described(nn.Linear):
        def get_extra_state(self):
            return {"made": "today"}

        def set_extra_state(self, state):
            pass

    model = nn.Sequential(*make_model()[:4], Described(16, 4))
    _, result, _ = run(Server(model, ShardPlanner("top_n")), rounds=1)
    assert [*result.arrays] == [*make_model().state_dict()]


@pytest.mark.parametrize(
    ("metrics", "means", "told"),
    [
        (
            [{"n": 1, "loss": 2.0, "each": [1.0, 2.0]}, {"n": 3, "each": [5.0, 2.0]}],
            {"loss": 2.0, "each": [4.0, 2.0]},
            "",
        ),
        (
            [{"n": 1, "each": [1.0] * 2}, {"n": 1, "each": [1.0] * 3}],
            {"each": [1.0, 1.0]},
            "left out a metric 'each' of shape [3]",
        ),
    ],
    ids=["that some report", "of other lengths"],
)
def test_weighted_means_of_metrics(metrics, means, told, caplog):
    records = [RecordDict({"metrics": MetricRecord(each)}) for each in metrics]
    assert weighted_means(records, "n") == MetricRecord(means)
    assert told in caplog.text


def test_round_waits_for_the_reports_of_new_nodes():
    class Slow(StubGrid):
        looks = 0

        def pull_messages(self, numbers):  # a report at every second look
            self.looks += 1
            return super().pull_messages(numbers) if self.looks % 2 else []

    _, _, grid = run(server_of(), grid_of(train, kind=Slow), rounds=1)
    assert [kind for _, kind, _ in grid.pushed] == ["query"] * 3 + ["train"] * 3


def test_round_begins_although_a_node_restarts_again_and_again(clock, monkeypatch):
    class Flapping(StubGrid):  # a node that crashes at its start has a new number every 20 s
        def get_node_ids(self):
            return [*self.settings, 2000 + int(clock[0] // 20)]

    def sleep(seconds):
        clock[0] += seconds
        assert clock[0] < 100

    monkeypatch.setattr("sharding.flower.nodes.sleep", sleep)
    strategy, _, grid = run(server_of(), grid_of(train, kind=Flapping), rounds=1)
    assert clock == [60.0]
    assert strategy.failures == {}
    assert trained(grid) == [1000, 999, 998]


def test_simulated_node_without_a_configuration_reports_the_given_keep_ratio():
    nodes = {node: {"partition-id": client} for node, client in ((7, 0), (8, 1))}
    _, _, grid = run(server_of(), grid_of(train, nodes, keep_ratio=0.5), rounds=1)
    assert [kind for _, kind, _ in grid.pushed] == ["query", "query", "train", "train"]


def test_shard_of_another_structure_fails_with_the_difference():
    grid = StubGrid(make_app(nn.Linear(3, 3), train), configs())
    strategy, _, _ = run(server_of(), grid, rounds=1)
    assert all("the model has no layer 2" in str(failure) for failure in strategy.failures[1].values())


def test_train_message_without_arrays_raises():
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    context = Context(1, 1, {}, RecordDict(), {})
    with pytest.raises(UserError, match="without 'arrays'"):
        train_message(message, context, make_model(), fit)
