"""The server's app as Flower calls it, with nodes that answer at once."""

import logging
import shlex
from unittest.mock import Mock

import pytest
from flwr.app import Context, RecordDict
from flwr.cli.build import build_fab_from_disk

from tests.train.federate.nodes import Nodes
from train.config.schema import load_config
from train.config.yaml_text import in_yaml
from train.experiment.assembly import read_dataset
from train.federate import server_app

pytestmark = pytest.mark.usefixtures("flower_identity", "no_waiting")


def settings(*overrides):
    words = shlex.join(["rounds=2", *overrides])
    return {"config": "configs/quickstart.yaml", "overrides": words, "start-timeout": 0.5, "round-timeout": 0.5}


@pytest.mark.parametrize(
    ("overrides", "told"), [(["clients.count=0"], "clients.count"), ([], "clients 0, 1, 2, 3, 4 and 15 more")]
)
def test_server_app_that_cannot_train_logs_one_line(tmp_path, caplog, overrides, told):
    caplog.set_level(logging.INFO, "train")
    output = f"output={tmp_path / 'run'}"
    server_app.main(Nodes({}), Context(1, 1, {}, RecordDict(), settings(output, *overrides)))
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert told in record.getMessage()
    assert record.exc_info is None
    assert not (tmp_path / "run").exists()


def test_server_app_that_lacks_a_package_logs_one_line(tmp_path, caplog, monkeypatch):
    told = "data=files needs Hugging Face's datasets"
    monkeypatch.setattr(server_app, "read_dataset", Mock(side_effect=ImportError(told)))
    server_app.main(Nodes({}), Context(1, 1, {}, RecordDict(), settings(f"output={tmp_path}")))
    (record,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert record.getMessage() == f"the run ends: {told}"


def test_nodes_are_not_sent_the_secret_seed():
    privacy = "privacy={clipping_norm: 1, noise_multiplier: 1, delta: 1e-4, secret_seed: 5}"
    config = server_app.read(settings("clients.sampler=poisson", privacy))
    assert config.privacy is not None
    assert server_app.config_for_nodes(config, read_dataset(config)).privacy is None


def test_server_app_with_other_overrides_has_another_directory():
    one, other, named = (
        server_app.read(settings(*words)).directory for words in ([], ["local.optimizer.lr=0.05"], ["output=/tmp/a"])
    )
    assert str(one) == "runs/quickstart-top_n-rounds=2-0"
    assert str(other) == "runs/quickstart-top_n-lr=0.05,rounds=2-0"
    assert str(named) == "/tmp/a"


def test_federation_has_max_share_of_a_half_by_default(tmp_path):
    assert server_app.read(settings()).aggregation.max_share == 0.5
    assert server_app.read(settings("aggregation.max_share=1")).aggregation.max_share == 1.0
    complete = tmp_path / "complete.yaml"
    complete.write_text(in_yaml(load_config("configs/quickstart.yaml").model_dump(mode="json", exclude={"output"})))
    assert server_app.read(settings() | {"config": str(complete)}).aggregation.max_share == 0.5


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's own
def test_flower_builds_the_app():
    assert build_fab_from_disk(server_app.ROOT)  # it refuses a pattern of pyproject.toml that matches nothing
