import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from models import build_model
from sharding import ShardPlanner
from sharding.errors import UserError
from sharding.failures import Failure, Kind
from train.engines import Update
from train.federate.messages import NodeInfo, TrainRequest, config_text, read_config, read_reply, reply_record


@pytest.fixture
def shard():
    model = build_model("mlp", input_shape=(1, 8, 8), num_classes=10, hidden=[32, 16])
    return ShardPlanner("collective").plan(model, {0: 0.5, 1: 0.5}, 3).shard(1)


def test_train_request_from_its_record_is_equal(shard, config):
    sent = TrainRequest(config("local.optimizer.lr=0.3", "seed=5"), shard, 3, 0.1)
    got = TrainRequest.from_record(sent.to_record())
    assert got.config == sent.config.model_copy(update={"output": None})
    assert (got.round, got.lr) == (3, 0.1)
    assert got.shard.to_bytes() == shard.to_bytes()


@pytest.mark.parametrize(
    "words", [["local.clip=.inf"], ["recipe=published", "strategy=top_n", "local.optimizer.lr=0.02"]]
)
def test_read_config_of_config_text_is_equal(config, words):
    sent = config(*words)
    assert read_config(config_text(sent)) == sent.model_copy(update={"output": None})


def test_train_request_record_has_the_shard_as_one_array(shard, config):
    record = TrainRequest(config(), shard, 3, 0.1).to_record()["shard"]
    (array,) = record.values()
    assert len(array.data) == shard.nbytes
    assert array.data == shard.to_bytes()


def test_read_reply_of_a_reply_record_is_equal(shard):
    got = read_reply(reply_record(Update(shard, torch.tensor(1.5))))
    assert got.shard.to_bytes() == shard.to_bytes()
    assert got.loss == 1.5
    with pytest.raises(UserError, match="no memory"):
        read_reply(reply_record(Update(None, None, Failure(Kind.FAILED, "no memory"))))
    assert read_reply(reply_record(Update(shard, torch.tensor(float("nan"))))).loss is None


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"shard": ConfigRecord({"loss": 1.0}), "values": ConfigRecord({"loss": 1.0})},
        {"shard": ArrayRecord({}), "values": ConfigRecord({"loss": 1.0})},
        {"shard": ArrayRecord({"shard": Array("uint8", (3,), "", b"abc")}), "values": ConfigRecord({"loss": 1.0})},
        {"shard": ArrayRecord({"shard": Array("uint8", (3,), "", b"abc")}), "values": ConfigRecord({"loss": "low"})},
        {"values": ConfigRecord({"loss": 1.0})},
    ],
)
def test_read_reply_of_invalid_content_raises(content):
    with pytest.raises(UserError):
        read_reply(RecordDict(content))


@pytest.mark.parametrize("values", [(-1, 0.5, 3), (0, 0.0, 3), (0, 1.5, 3), (0, 0.5, 0), (True, 0.5, 3), (0, 0.5)])
def test_node_info_with_invalid_values_raises(values):
    record = dict(zip(("partition", "keep_ratio", "num_samples"), values, strict=False))
    with pytest.raises(UserError, match=f"it reports partition={values[0]}, keep_ratio={values[1]}.*must be"):
        NodeInfo.from_record(RecordDict({"card": ConfigRecord(record)}))


def test_node_info_from_its_record_is_equal():
    for info in (NodeInfo(3, 0.25, 17), NodeInfo(0, 1, 3)):
        assert NodeInfo.from_record(info.to_record()) == info
