"""The server against nodes that answer at once: what every reply comes to."""

import json
import logging
from dataclasses import replace
from functools import partial
from math import nan

import pytest
import torch
from safetensors.torch import load_file

from sharding import UserError
from sharding.flower.messages import pack
from tests.train.federate.nodes import Nodes
from tests.train.runs import assert_same, model_of, read
from train.callbacks import EachRound
from train.callbacks.stopping import DivergedError
from train.experiment.assembly import assemble
from train.federate import roster as waiting
from train.federate import server_app
from train.federate.messages import read_config, read_reply
from train.federate.roster import Timeouts
from train.federate.server_app import assemble_over
from train.run import run

pytestmark = pytest.mark.usefixtures("flower_identity", "no_waiting")


def settings(config, count=4, first=100):
    """Return the nodes of the clients that the configuration deals out, by numbers that start anywhere."""
    ratios = assemble(config).clients.keep_ratios
    return {first + 7 * client: {"partition-id": client, "keep-ratio": ratios[client]} for client in range(count)}


def over(config, nodes, after_round=lambda metrics: None):
    build = partial(assemble_over, grid=nodes, timeouts=Timeouts(0.5, 0.5))
    return read(run(config, [EachRound(after_round)], resume=True, build=build))


def alone(config, folder):
    config = config.model_copy(update={"output": folder})
    run(config)
    return config


@pytest.mark.parametrize(
    "overrides",
    [
        ["strategy=collective"],
        ["strategy=dense", "data.partition=iid"],
        ["compression=bfloat16", "strategy=top_n"],
        ["compression=int8", "clients.sampler=ocs", "clients.sampler.budget=2", "clients.per_round=4"],
        ["clients.sampler=uniform_upload", "clients.sampler.budget=2", "clients.per_round=4"],
        ["clients.sampler=ocs_partial", "clients.sampler.budget=1"],
        ["clients.sampler=statistical"],
        ["clients.sampler=uniform", "clients.sampler.replacement=true"],
        ["clients.sampler=uniform_scaled", "data.partition=power_law"],
        ["clients.sampler=poisson", "privacy={clipping_norm: 1, noise_multiplier: 1, delta: 1e-4, secret_seed: 5}"],
    ],
)
def test_federation_of_nodes_equals_a_simulation(config, tmp_path, overrides):
    ours = config(*overrides)
    over(ours, Nodes(settings(ours)))
    assert_same(ours.directory, alone(ours, tmp_path / "alone").directory)


def altered(change):
    """Return what has a node's update changed on its way."""

    def bend(reply):
        reply.content.update(pack(change(read_reply(reply.content).update)))
        return [reply]

    return bend


def scaled(factor):
    def change(update):
        terms = {name: replace(each, u=factor * each.u, v=factor * each.v) for name, each in update.terms.items()}
        return replace(update, terms=terms, whole={name: factor * value for name, value in update.whole.items()})

    return change


def cut(shard):
    return replace(shard, whole={name: value[..., :-1].clone() for name, value in shard.whole.items()})


def impostor(reply):
    reply.metadata.__dict__["_src_node_id"] = 100
    return [reply]


FAULTS = {
    "NaN": (altered(scaled(nan)), "NaN or Inf in", "not finite"),
    "shape": (altered(cut), "has shape", "malformed"),
    "stale": (altered(lambda shard: replace(shard, plan_id="0-stale")), "not of", "another plan"),
    "garbled": (lambda reply: (reply.content.clear(), [reply])[1], "a message without", "malformed"),
    "silent": (lambda reply: [], "no reply within", "late"),
    "of another node": (impostor, "no reply within", "late"),
}


def introduced(bend):
    """Return what bends a node's replies after its first word."""
    return lambda reply: [reply] if "node" in reply.content else bend(reply)


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_reply_is_rejected_with_the_reason(config, tmp_path, fault):
    ours = config("clients.per_round=4", "rounds=1")
    nodes, (bend, reason, kind) = Nodes(settings(ours)), FAULTS[fault]
    nodes.bend[107] = introduced(bend)
    (line,) = over(ours, nodes)
    assert (line["num_aggregated"], line["num_failed"]) == (3, 1)
    assert reason in line["failures"]["1"]
    assert line["failed_by_kind"] == {kind: 1}
    missing = ours.model_copy(update={"output": tmp_path / "missing"})
    gone = Nodes(settings(ours))
    gone.bend[107] = introduced(FAULTS["silent"][0])
    over(missing, gone)
    assert model_of(ours.directory) == model_of(missing.directory)  # what is refused is as if it had never come


def test_duplicate_reply_counts_once(config, tmp_path):
    ours = config("clients.per_round=4")
    nodes = Nodes(settings(ours))
    nodes.bend[107] = lambda reply: [reply, reply]
    over(ours, nodes)
    assert_same(ours.directory, alone(ours, tmp_path / "alone").directory)


def test_failed_node_is_rejected_with_its_reason(config):
    ours = config("clients.per_round=4", "rounds=1")
    nodes = Nodes(settings(ours))
    nodes.bend[107] = lambda reply: [nodes.settings[107].update({"data": "nowhere"}), reply][1:]  # from its first word
    (line,) = over(ours, nodes)
    assert "data=nowhere cannot be read" in line["failures"]["1"]


def test_federation_with_half_of_the_nodes_gone_continues(config):
    ours = config("clients.per_round=4", "rounds=3", "tail=null")
    nodes, whole = Nodes(settings(ours)), settings(ours)

    def leave_and_return(metrics):
        nodes.settings = dict([*whole.items()][:2]) if metrics["round"] == 0 else whole

    told = over(ours, nodes, leave_and_return)
    assert [line["num_aggregated"] for line in told] == [4, 2, 4]
    assert set(told[1]["failures"].values()) == {"its node is not connected"}
    assert [line["failed_by_kind"] for line in told] == [{}, {"absent": 2}, {}]
    assert all(line["bytes_down"] == line["bytes_up"] for line in told)  # an absent node is sent nothing


def test_round_without_nodes_waits_for_one(config):
    ours = config("clients.per_round=4", "rounds=2")
    nodes, whole, looks = Nodes(settings(ours)), settings(ours), iter(range(10))

    def back_at_the_third_look():
        if not nodes.settings and next(looks) == 2:
            nodes.settings = whole
        return list(nodes.settings)

    nodes.get_node_ids = back_at_the_third_look
    told = over(ours, nodes, lambda metrics: nodes.settings.clear())
    assert [line["num_aggregated"] for line in told] == [4, 4]


def test_rounds_without_valid_replies_keep_the_model_and_end_the_run(config):
    ours = config("rounds=7", "clients.per_round=4")
    nodes = Nodes(settings(ours))
    nodes.bend = dict.fromkeys(nodes.settings, introduced(FAULTS["silent"][0]))
    with pytest.raises(DivergedError):
        over(ours, nodes)


def test_missing_nodes_raise_with_their_clients(config):
    ours = config()
    with pytest.raises(UserError, match="clients 2, 3 are missing"):
        over(ours, Nodes(settings(ours, count=2)))


def test_first_node_info_of_a_client_is_kept(config, caplog):
    ours = config("rounds=1")
    over(ours, Nodes(settings(ours)))
    nodes = Nodes(settings(ours))
    nodes.settings[107] = nodes.settings[107] | {"keep-ratio": 0.9}
    roster, _ = server_app.recall(ours)
    known = waiting.Roster(nodes, ours, Timeouts(0.5, 0.5), roster)
    assert sorted(known.connected()) == [0, 2, 3]
    assert "but this run began with" in caplog.text


@pytest.mark.parametrize("wrong", [{}, {"partition-id": "x"}, {"partition-id": 9}])
def test_node_with_an_invalid_info_is_refused_with_the_reason(config, caplog, wrong):
    ours = config()
    nodes = Nodes(settings(ours) | {500: wrong})
    known = waiting.Roster(nodes, ours, Timeouts(0.5, 0.5))
    known.gather()
    assert len(known.connected()) == 4
    assert "node 500 is left out" in caplog.text


def test_node_that_returns_is_invited_again(config):
    ours = config()
    grid = Nodes(settings(ours))
    right, wrong = grid.settings[107], {"partition-id": "x"}
    known = waiting.Roster(grid, ours, Timeouts(0.5, 0.5))
    others = {node: old for node, old in grid.settings.items() if node != 107}
    for returning, there in (({107: wrong}, [0, 2, 3]), ({}, [0, 2, 3]), ({107: right}, [0, 1, 2, 3])):
        grid.settings = others | returning
        assert [sorted(known.connected()) for _ in range(2)][1] == there


def test_resumed_federation_leaves_the_device_to_nodes(config):
    ours, told = config("local.schedule=constant"), []
    for rounds in (1, 2):
        grid = Nodes(settings(ours))
        server_app.train(ours.model_copy(update={"rounds": rounds}), grid, Timeouts(0.5, 0.5))
        told += [message.content["run"]["configuration"] for message in grid.sent if "run" in message.content]
    assert {read_config(text).device for text in told} == {"auto"}


def test_configuration_is_sent_once_to_a_node_and_again_if_it_is_lost(config, tmp_path):
    ours = config("clients.per_round=4", "rounds=3")
    nodes = Nodes(settings(ours))

    def forget(metrics):
        if metrics["round"] == 0:
            nodes.states[107].clear()

    over(ours, nodes, forget)
    sent = [(node, kind) for node, kind, content in nodes.pushed if "run" in content]
    assert sent == [*((node, "query") for node in (100, 107, 114, 121)), (107, "train")]
    assert_same(ours.directory, alone(ours, tmp_path / "alone").directory)


def numbers(roster):
    return {client: node.id for client, node in roster.connected().items()}


def test_second_node_of_a_client_is_refused(config, caplog):
    ours = config()
    grid = Nodes(settings(ours))
    known = waiting.Roster(grid, ours, Timeouts(0.5, 0.5))
    known.gather()
    first = grid.settings.pop(100)
    grid.settings[500] = dict(first)
    assert sorted(known.connected()) == [1, 2, 3]
    assert "node 500 is left out: it claims client 0, which belongs to node 100" in caplog.text
    grid.settings[100] = first
    assert numbers(known) == {0: 100, 1: 107, 2: 114, 3: 121}


def keyed(config, **kwargs):
    """Return nodes that each have a key, the same for a client at whatever number."""
    grid = Nodes(settings(config, **kwargs))
    grid.keys = {id: b"key %d" % node["partition-id"] for id, node in grid.settings.items()}
    return grid


def resumed(config, grid):
    return waiting.Roster(grid, config, Timeouts(0.5, 0.5), *server_app.recall(config))


def test_restarted_server_keeps_the_key_of_a_client(config, caplog):
    ours = config("rounds=1")
    over(ours, keyed(ours))
    grid = keyed(ours, first=10**9)
    grid.keys |= {10**9: b"another", 5: b"key 0"}
    known = resumed(ours, grid)
    assert sorted(known.connected()) == [1, 2, 3]
    assert "client 0, which belongs to another key in this run" in caplog.text
    grid.settings[5] = grid.settings[10**9]
    assert numbers(known)[0] == 5
    assert known.node_keys() == json.loads((ours.directory / "clients.json").read_text())["small"]["node_keys"]


def test_node_with_the_key_of_a_client_precedes_others(config, caplog):
    ours = config("rounds=1")
    over(ours, keyed(ours))
    grid, thief = keyed(ours), {"partition-id": 0, "keep-ratio": assemble(ours).clients.keep_ratios[0]}
    whole, grid.settings, grid.keys[500] = grid.settings, {500: thief}, b"another"
    known = resumed(ours, grid)
    assert numbers(known) == {0: 500}  # no key of the run is there: nodes may get a new one at each start
    grid.settings = whole | grid.settings
    assert numbers(known) == {0: 100, 1: 107, 2: 114, 3: 121}
    assert "node 500 is left out: client 0 belongs to node 100, which has its key" in caplog.text


def test_max_share_limits_a_node_with_a_huge_size(config, tmp_path, caplog):
    sizes = {}
    for share in (0.5, 1.0):
        ours = config("clients.per_round=4", "rounds=1", f"aggregation.max_share={share}")
        ours = ours.model_copy(update={"output": tmp_path / str(share)})
        nodes = Nodes(settings(ours))

        def boast(reply):
            if "node" in reply.content:
                reply.content["node"]["num-examples"] = 200_000
            return [reply]

        nodes.bend[107] = boast
        over(ours, nodes)
        start = assemble(ours).model.state_dict()
        end = load_file(ours.directory / "checkpoint.safetensors")
        sizes[share] = {name: end[name] - value for name, value in start.items()}
        assert json.loads((ours.directory / "clients.json").read_text())["small"]["samples"][1] == 200_000
    assert any(not torch.equal(sizes[0.5][name], sizes[1.0][name]) for name in sizes[1.0])
    assert "client 1 reports 200000 of all" in caplog.text


def test_waiting_server_logs_the_missing_clients_periodically(config, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "train")
    monkeypatch.setattr(waiting, "REMIND", 0.1)
    ours = config()
    with pytest.raises(UserError, match="missing"):
        waiting.Roster(Nodes(settings(ours, count=2)), ours, Timeouts(0.5, 0.5)).gather()
    waits = [record.getMessage() for record in caplog.records if "waiting for" in record.getMessage()]
    assert 2 < len(waits) < 8
    assert set(waits[1:]) == {"2 of 4 clients connected, waiting for 2, 3"}


@pytest.mark.parametrize("asked", ["alignment=true", "evaluate_training=true", "clients.sampler=aocs"])
def test_federation_with_unsupported_options_is_refused(config, asked):
    ours = config(asked, *(["clients.sampler.budget=1"] if "aocs" in asked else []))
    with pytest.raises(UserError, match=asked.removesuffix("=true")):
        over(ours, Nodes({}))


def test_interrupted_federation_resumes_with_other_nodes(config, tmp_path):
    ours = config("rounds=3", "clients.per_round=4")

    def cut_off(metrics):
        if metrics["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        over(ours, Nodes(settings(ours)), cut_off)
    over(ours, Nodes(settings(ours, first=10**15)))
    assert_same(ours.directory, alone(ours, tmp_path / "alone").directory)


class Late(Nodes):
    """Nodes of which none is there for the first looks."""

    looks = 0

    def get_node_ids(self):
        self.looks += 1
        return super().get_node_ids() if self.looks > 5 else []


def test_resumed_federation_waits_for_nodes_until_the_timeout(config, caplog):
    ours = config("rounds=1", "clients.per_round=4")
    over(ours, Nodes(settings(ours)))
    roster, _ = server_app.recall(ours)
    known = waiting.Roster(Late(settings(ours)), ours, Timeouts(0.5, 0.5), dict(roster))
    known.gather()
    assert sorted(known.connected()) == [0, 1, 2, 3]
    few = waiting.Roster(Nodes(settings(ours, count=3)), ours, Timeouts(0.5, 0.5), dict(roster))
    few.gather()
    assert "clients 3 are missing" in caplog.text
