"""Nodes that report before they send: who is asked, what the server sees, and what a node that misbehaves comes to."""

from math import inf, nan

import pytest
from flwr.app import ConfigRecord

from tests.train.federate.nodes import Nodes
from tests.train.federate.test_server import altered, lines, over, scaled, settings
from train.rounds import DivergedError

pytestmark = pytest.mark.usefixtures("flower_identity", "no_waiting")

OCS = ["clients.sampler=ocs", "clients.budget=2", "clients.per_round=4", "rounds=1"]
AOCS = ["clients.sampler=aocs", "clients.budget=2", "clients.per_round=4", "rounds=1"]


def kinds(nodes):
    return [message.metadata.message_type for message in nodes.sent if message.metadata.message_type != "query"]


def replies_to(nodes, kind, change):
    """Have node 107 answer messages of this kind with what `change` makes of its reply; others as they are."""
    asked = {}
    whole = nodes._answer

    def answer(number, message):
        asked[number] = message.metadata.message_type
        return whole(number, message)

    nodes._answer = answer
    nodes.bend[107] = lambda reply: change(reply) if asked[107] == kind else [reply]


def renumbered(name, **values):
    """Return what puts other values in a record of a reply."""

    def change(reply):
        held = dict(reply.content[name]) | values
        reply.content[name] = ConfigRecord(held)
        return [reply]

    return change


@pytest.mark.parametrize("asked", [OCS, AOCS], ids=["ocs", "aocs"])
def test_only_those_who_are_heard_send_their_update(config, asked):
    ours, sent = config(*asked, "rounds=4"), []
    nodes = Nodes(settings(ours))
    nodes.bend = dict.fromkeys(nodes.settings, lambda reply: [sent.append("shard" in reply.content), reply][1:])
    told = over(ours, nodes)
    assert sum(sent) == sum(line["heard"] for line in told) < 4 * 4
    assert not any(line["failed"] for line in told)


def test_aocs_shows_the_server_no_norm(config):
    ours = config(*AOCS)
    nodes, seen = Nodes(settings(ours)), []

    def look(reply):
        seen.append(reply.content)
        return [reply]

    nodes.bend = dict.fromkeys(nodes.settings, look)
    over(ours, nodes)
    reports = [content["report"] for content in seen if "report" in content]
    assert [dict(report) for report in reports] == [{}] * 4
    assert kinds(nodes).count("train.totals") >= 4
    assert kinds(nodes).count("train.draw") == 4


def no_reply(reply):
    return []


LIARS = {  # what is wrong, with which sampler, in which reply, and what is said of it
    "another norm": ([*OCS, "clients.budget=4"], "train", renumbered("report", norm=1.0), "but it reported 1"),
    "a negative norm": (OCS, "train", renumbered("report", norm=-1.0), "its norm is -1"),
    "a norm of NaN": (OCS, "train", renumbered("report", norm=nan), "reported a norm of nan"),
    "NaN, to totals": (AOCS, "train", renumbered("report", norm=nan), "reported a norm of nan"),
    "a norm, to totals": (AOCS, "train", renumbered("report", norm=1.0), "reported a norm of 1.0"),
    "no norm": (OCS, "train", lambda reply: [reply.content["report"].clear(), reply][1:], "its report has no norm"),
    "gone before it is asked": ([*OCS, "clients.budget=4"], "train.upload", no_reply, "no reply within"),
    "gone between totals": (AOCS, "train.totals", no_reply, "no reply within"),
    "a summand of Inf": (AOCS, "train.totals", renumbered("numbers", numbers=[0.0, inf]), "its numbers are"),
    "a count of 7": (AOCS, "train.totals", renumbered("numbers", numbers=[7.0, 1.0]), "its numbers are"),
    "gone at the draw": ([*AOCS, "clients.budget=4"], "train.draw", no_reply, "no reply within"),
}


@pytest.mark.parametrize("lie", LIARS)
def test_who_misbehaves_is_left_out_and_named(config, lie):
    asked, kind, change, why = LIARS[lie]
    ours = config(*asked)
    nodes = Nodes(settings(ours))
    replies_to(nodes, kind, change)
    (line,) = over(ours, nodes)
    assert list(line["failures"]) == ["1"]
    assert why in line["failures"]["1"]
    assert line["heard"] >= 1


def test_who_sends_without_having_drawn_so_is_refused(config):
    ours = config(*AOCS, "clients.budget=1e-9")  # nobody's coin falls so
    nodes = Nodes(settings(ours))

    def pushy(reply):
        reply.content.update({name: nodes.states[107][name] for name in ("shard", "values")})
        return [reply]

    replies_to(nodes, "train.draw", pushy)
    with pytest.raises(DivergedError):  # it was the only round
        over(ours, nodes)
    (line,) = lines(ours)
    assert "was not drawn" in line["failures"]["1"]
    assert line["heard"] == 0


def test_a_node_that_was_started_anew_has_nothing_to_send(config):
    ours = config(*OCS, "clients.budget=4")
    nodes = Nodes(settings(ours))
    replies_to(nodes, "train", lambda reply: [nodes.states[107].clear(), reply][1:])
    (line,) = over(ours, nodes)
    assert "it was started anew" in line["failures"]["1"]
    assert line["heard"] == 3


@pytest.mark.parametrize("asked", [OCS, AOCS], ids=["ocs", "aocs"])
def test_an_update_that_is_spoiled_on_its_way_is_refused(config, asked):
    ours = config(*asked, "clients.budget=4")
    nodes = Nodes(settings(ours))
    nodes.bend[107] = altered(scaled(nan))
    (line,) = over(ours, nodes)
    assert list(line["failures"]) == ["1"]
    assert line["heard"] == 3
