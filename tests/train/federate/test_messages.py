import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from models import build_model
from sharding import ShardPlanner, UserError
from sharding.flower.messages import pack
from train.federate.messages import config_text, keep_config, read_config, read_reply


@pytest.fixture
def shard():
    model = build_model("mlp", input_shape=(1, 8, 8), num_classes=10, hidden=[32, 16])
    return ShardPlanner("collective").plan(model, {0: 0.5, 1: 0.5}, 3).shard(1)


@pytest.mark.parametrize(
    "words", [["local.clip=.inf"], ["recipe=published", "strategy=top_n", "local.optimizer.lr=0.02"]]
)
def test_read_config_of_config_text_is_equal(config, words):
    sent = config(*words)
    received = read_config(config_text(sent))
    assert received == sent.model_copy(update={"output": None})
    assert read_config(config_text(received)) is received  # a node parses it once


def test_read_reply_has_the_update_and_a_finite_loss(shard):
    def read(loss):
        return read_reply(RecordDict({**pack(shard), "metrics": MetricRecord({"train_loss": loss})}))

    assert read(1.5).update.to_bytes() == shard.to_bytes()
    assert read(1.5).loss == 1.5
    assert read(float("nan")).loss is None
    assert torch.is_tensor(read(1.5).loss)


LOSS = MetricRecord({"train_loss": 1.0})


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"arrays": ConfigRecord({"loss": 1.0}), "metrics": LOSS},
        {"arrays": ArrayRecord({}), "metrics": LOSS},
        {"arrays": ArrayRecord({"shard": Array("uint8", (3,), "", b"abc")}), "metrics": LOSS},
        {"metrics": LOSS},
    ],
)
def test_read_reply_of_invalid_content_raises(content):
    with pytest.raises(UserError):
        read_reply(RecordDict(content))


@pytest.mark.parametrize("loss", [{}, {"train_loss": 1}, {"train_loss": [1.0]}])
def test_read_reply_without_a_loss_raises(shard, loss):
    with pytest.raises(UserError, match=r"its loss is .*, not a number"):
        read_reply(RecordDict({**pack(shard), "metrics": MetricRecord(loss)}))


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", '{"rounds": []}'])
def test_read_config_of_something_else_raises(text):
    with pytest.raises(UserError):
        read_config(text)


def test_message_without_the_digest_of_the_configuration_raises(flower_identity):
    context = Context(1, 1, {}, RecordDict({"run": ConfigRecord({"configuration": "{}"})}), {})
    with pytest.raises(UserError, match="a message without 'config'"):
        keep_config(Message(RecordDict(), dst_node_id=1, message_type="query"), context)
