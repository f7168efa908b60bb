"""The server's app as Flower calls it, with nodes that answer at once."""

import logging
import shlex

import pytest
from flwr.app import Context, RecordDict

from tests.train.federate.nodes import Nodes
from train.federate import app

pytestmark = pytest.mark.usefixtures("flower_identity", "no_waiting")


def settings(*overrides):
    words = shlex.join(["rounds=2", *overrides])
    return {"config": "configs/quickstart.yaml", "overrides": words, "start-timeout": 0.5, "round-timeout": 0.5}


@pytest.mark.parametrize(
    ("overrides", "told"), [(["clients.count=0"], "clients.count"), ([], "nodes for the partitions 0, 1, 2")]
)
def test_what_keeps_a_run_from_training_is_one_line(tmp_path, caplog, overrides, told):
    caplog.set_level(logging.INFO, "train")
    output = f"output={tmp_path / 'run'}"
    app.main(Nodes({}), Context(1, 1, {}, RecordDict(), settings(output, *overrides)))
    (record,) = (record for record in caplog.records if record.name == "train.federate.app")
    assert record.levelname == "ERROR"
    assert told in record.getMessage()
    assert record.exc_info is None
    assert not (tmp_path / "run").exists()


def test_runs_with_other_overrides_have_directories_of_their_own():
    one, other, named = (app.read(settings(*words)).directory for words in ([], ["local.lr=0.05"], ["output=/tmp/a"]))
    assert str(one) == "runs/quickstart-collective-rounds=2-0"
    assert str(other) == "runs/quickstart-collective-lr=0.05,rounds=2-0"
    assert str(named) == "/tmp/a"
