"""Nodes that report before they send: who is asked, what the server sees, and what a node that misbehaves comes to."""

from math import nan

import pytest
from flwr.app import MetricRecord

from tests.train.federate.nodes import Nodes
from tests.train.federate.test_server import alone, over, settings
from tests.train.runs import read

pytestmark = pytest.mark.usefixtures("flower_identity", "no_waiting")

OCS = ["clients.sampler=ocs", "clients.sampler.budget=2", "clients.per_round=4", "rounds=1"]


def replies_to(nodes, kind, change):
    """Have node 107 answer messages of this kind with what `change` makes of its reply; others as they are."""
    nodes.bend[107] = lambda reply: change(reply) if reply.metadata.message_type == kind else [reply]


def renumbered(name, **values):
    """Return what puts other values in a record of a reply."""

    def change(reply):
        metrics = dict(reply.content[name]) | values
        reply.content[name] = MetricRecord(metrics)
        return [reply]

    return change


def test_two_stage_round_has_updates_of_selected_nodes_only(config):
    ours, sent = config(*OCS, "rounds=4"), []
    nodes = Nodes(settings(ours))
    nodes.bend = dict.fromkeys(nodes.settings, lambda reply: [sent.append("arrays" in reply.content), reply][1:])
    told = over(ours, nodes)
    assert sum(sent) == sum(line["num_aggregated"] for line in told) < 4 * 4
    assert not any(line["num_failed"] for line in told)


LIARS = {  # what is wrong, with which sampler, in which reply, and what is said of it
    "another norm": ([*OCS, "clients.sampler.budget=4"], "train", renumbered("metrics", norm=1.0), "but it reported 1"),
    "a negative norm": (OCS, "train", renumbered("metrics", norm=-1.0), "its norm is -1"),
    "a norm of NaN": (OCS, "train", renumbered("metrics", norm=nan), "reported a norm of nan"),
    "no norm": (OCS, "train", lambda reply: [reply.content["metrics"].clear(), reply][1:], "its norm is None"),
    "gone before it is asked": (
        [*OCS, "clients.sampler.budget=4"],
        "train.upload",
        lambda reply: [],
        "no reply within",
    ),
}


@pytest.mark.parametrize("lie", LIARS)
def test_two_stage_round_with_an_invalid_node_rejects_it(config, lie):
    asked, kind, change, reason = LIARS[lie]
    ours = config(*asked)
    nodes = Nodes(settings(ours))
    replies_to(nodes, kind, change)
    (line,) = over(ours, nodes)
    assert list(line["failures"]) == ["1"]
    assert reason in line["failures"]["1"]
    assert line["num_aggregated"] >= 1


def test_restarted_node_has_no_update_to_send(config):
    ours = config(*OCS, "clients.sampler.budget=4")
    nodes = Nodes(settings(ours))
    replies_to(nodes, "train", lambda reply: [nodes.states[107].clear(), reply][1:])
    (line,) = over(ours, nodes)
    assert "no longer has an update" in line["failures"]["1"]
    assert line["num_aggregated"] == 3


def test_node_that_leaves_after_training_counts_its_download(config, tmp_path):
    ours = config(*OCS, "clients.sampler.budget=4")
    nodes = Nodes(settings(ours))
    replies_to(nodes, "train", lambda reply: [nodes.settings.pop(107), reply][1:])
    (line,), (whole,) = over(ours, nodes), read(alone(ours, tmp_path / "alone").directory)
    assert line["failures"] == {"1": "its node is not connected"}
    assert line["failed_by_kind"] == {"late": 1}
    assert line["bytes_down"] == whole["bytes_down"]
