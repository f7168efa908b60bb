"""What the messages of `sharding.flower` have on top in a federation: the configuration, and norms.

A message to a node has in its record ``config`` the configuration, the round from 0 and the learning rate. Readers
trust nothing: missing or invalid values raise a `UserError`.
"""

import json
from math import isfinite

import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict

from sharding import Shard, Update
from sharding.errors import UserError
from sharding.flower.messages import ARRAYS, METRICS, bytes_of, part_of
from sharding.rounds.failures import one_line
from sharding.rounds.norms import update_norm
from train.config.schema import Config, check_config
from train.engines import Reply

CONFIG_TEXT, ROUND, LR = "config", "round", "lr"  # what a node is sent
NUM_SAMPLES, LOSS, NORM = "num-examples", "train_loss", "norm"  # what it reports
UPLOAD = "train.upload"  # the kind of message that asks a node for the update it keeps


def config_text(config: Config) -> str:
    """Return the configuration for a node: all keys but those of the server's output."""
    return config.model_dump_json(exclude={"output", "tracker"})


def read_config(text: str) -> Config:
    """Return the configuration that a server has sent.

    Raises:
        UserError: it is invalid.
    """
    return check_config(json.loads(text))


def read_reply(content: RecordDict) -> Reply:
    """Read a node's reply; its update need not fit the round.

    Raises:
        UserError: the content is not that of `train_message`, or has no loss.
    """
    loss = part_of(content, METRICS, MetricRecord).get(LOSS)
    if not isinstance(loss, float):
        raise UserError(f"its loss is {one_line(repr(loss))}, not a number")
    update = Update.from_bytes(bytes_of(part_of(content, ARRAYS, ArrayRecord)))
    return Reply(update, torch.tensor(loss) if isfinite(loss) else None)


def read_norm(content: RecordDict) -> float:
    """Read the report of a node that keeps its update: the norm ‖U‖/lr, which may not be finite.

    Raises:
        UserError: there is no valid norm.
    """
    norm = part_of(content, METRICS, MetricRecord).get(NORM)
    if not isinstance(norm, float) or norm < 0:
        raise UserError(f"its norm is {one_line(repr(norm))}, not a number of at least 0")
    return norm


def norm_of(sent: Shard, update: Update, lr: float) -> float:
    """Return ‖U‖/lr, with the bits of `train.engines.two_stage.keep_updates`."""
    return float(torch.stack([update_norm(sent, update)]) / lr)
