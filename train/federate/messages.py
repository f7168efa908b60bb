"""What the messages of `sharding.flower` have on top in a federation: the run's configuration, and norms.

A node is sent the configuration with its first message and keeps it. Each message has its digest in the record
``config``, and in training the round from 0 and the learning rate. Readers trust nothing: missing or invalid values
raise a `UserError`.
"""

import json
from functools import lru_cache
from hashlib import sha256
from math import isfinite

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from sharding import Shard, Update
from sharding.errors import UserError
from sharding.flower.messages import CONFIG, LACKS, METRICS, part_of, unpack
from sharding.rounds.failures import one_line
from sharding.rounds.norms import update_norm
from train.config.schema import Config, check_config
from train.engines import Reply

RUN = "run"  # the record with the run's configuration, in a node's first message and in its state
TEXT, DIGEST = "configuration", "digest"  # of that record, and in each message's record `config`
ROUND, LR = "round", "lr"  # what a node is sent
NUM_SAMPLES, LOSS, NORM = "num-examples", "train_loss", "norm"  # what it reports
UPLOAD = "train.upload"  # the kind of message that asks a node for the update it keeps


def config_text(config: Config) -> str:
    """Return the configuration for a node: all keys but those of the server's output."""
    return config.model_dump_json(exclude={"output", "tracker"})


def question_of(config: Config) -> RecordDict:
    """Return the first message to a node: the configuration and its digest."""
    text = config_text(config)
    return RecordDict({RUN: ConfigRecord({TEXT: text}), CONFIG: ConfigRecord({DIGEST: digest_of(text)})})


def keep_config(message: Message, context: Context) -> Config:
    """Return the configuration of a message, which a node has been sent once; raise a UserError if it is not there."""
    if RUN in message.content:
        context.state[RUN] = message.content.pop(RUN)
    text = context.state.get(RUN, {}).get(TEXT)
    if not isinstance(text, str) or digest_of(text) != part_of(message.content, CONFIG, ConfigRecord).get(DIGEST):
        raise UserError(f"{LACKS} the configuration of the run")
    return read_config(text)


def digest_of(text: str) -> str:
    """Return a digest of a configuration's text."""
    return sha256(text.encode()).hexdigest()


@lru_cache(maxsize=1)
def read_config(text: str) -> Config:
    """Return the configuration that a server has sent, or raise a UserError if it is invalid."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the server's configuration is no JSON ({error})") from error
    return check_config(values)


def read_reply(content: RecordDict) -> Reply:
    """Read a node's reply, or raise a UserError if it is none of `train_message`; its update need not fit the round."""
    loss = part_of(content, METRICS, MetricRecord).get(LOSS)
    if not isinstance(loss, float):
        raise UserError(f"its loss is {one_line(repr(loss))}, not a number")
    return Reply(unpack(Update, content), torch.tensor(loss) if isfinite(loss) else None)


def read_norm(content: RecordDict) -> float:
    """Read the norm ‖U‖/lr of a node that keeps its update, or raise a UserError; it may not be finite."""
    norm = part_of(content, METRICS, MetricRecord).get(NORM)
    if not isinstance(norm, float) or norm < 0:
        raise UserError(f"its norm is {one_line(repr(norm))}, not a number of at least 0")
    return norm


def norm_of(sent: Shard, update: Update, lr: float) -> float:
    """Return ‖U‖/lr, with the bits of `train.engines.two_stage.report`."""
    return float(torch.stack([update_norm(sent, update)]) / lr)
