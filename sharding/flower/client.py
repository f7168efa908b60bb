"""A node's side: train or evaluate the shard of a message with the user's own function.

A node keeps the frozen part of a pretrained model in its state, which Flower keeps for the length of a run.
"""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import nn

from sharding.errors import UserError
from sharding.flower.messages import (
    ARRAYS,
    CONFIG,
    FROZEN,
    LACKS,
    METRICS,
    NODE,
    metric_record,
    pack,
    part_of,
    settings,
    unpack,
)
from sharding.rounds.client import client_model
from sharding.rounds.frozen import Frozen
from sharding.rounds.shard import Shard

Function = Callable[[nn.Module, ConfigRecord], Mapping[str, Any]]


def query_message(message: Message, context: Context, keep_ratio: float | None = None) -> Message:
    """Report this node's ``keep-ratio`` and ``partition-id``, as its configuration has them.

    Args:
        message: a message of `SpectralSharding`.
        context: the app's context.
        keep_ratio: the keep ratio of a node whose configuration has none, such as a node of a simulation.

    Raises:
        UserError: there is no keep ratio in (0, 1].
    """
    settings = context.node_config
    ratio = settings.get("keep-ratio", keep_ratio)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise UserError(f"keep-ratio is {ratio!r} in --node-config; set a number above 0 and at most 1")
    partition = {key: settings[key] for key in ("partition-id",) if key in settings}
    return Message(RecordDict({NODE: ConfigRecord({"keep-ratio": ratio, **partition})}), reply_to=message)


def train_message(
    message: Message,
    context: Context,
    structure: nn.Module,
    train: Function,
    *,
    device: torch.device | str = "cpu",
) -> Message:
    """Train the shard of a message with one's own loop, and return the reply::

        def fit(model, config):
            optimizer = torch.optim.AdamW(model.parameters(), config["lr"])
            optimizer.register_step_pre_hook(clip_and_decay(model, config["clip"]))
            ...
            return {"num-examples": len(data), "train_loss": loss}

    Args:
        message: a message of `SpectralSharding`. Its arrays are removed once they are read, to save memory.
        context: the app's context; its state keeps the frozen part of a pretrained model, which the server sends once.
        structure: the model's structure, as for `sharding.client_model`, as made in `init_empty()`; it is not changed.
        train: trains the client's small model in place, and returns metrics, among them ``num-examples``. It also takes
            the message's configuration, which has ``server-round`` and the shard's ``clip``, infinite for no clipping.
        device: the model's device.

    Raises:
        UserError: the message has no shard, the shard does not fit the structure, the frozen part is missing, or a
            metric is no number. Flower sends the error's text to the server, as it does with any error in `train`.
    """
    shard, model = _received(message, context, structure, device)
    if not model.training:  # else parts in evaluation, such as frozen batch norms, stay so
        model.train()
    message.content[CONFIG]["clip"] = inf if shard.clip is None else shard.clip  # Flower has no None
    metrics = metric_record(train(model, message.content[CONFIG]))
    return Message(RecordDict({**pack(shard.read_from(model)), METRICS: metrics}), reply_to=message)


def evaluate_message(
    message: Message,
    context: Context,
    structure: nn.Module,
    evaluate: Function,
    *,
    device: torch.device | str = "cpu",
) -> Message:
    """Evaluate the shard of a message with one's own function, and return the reply.

    The shard has the largest terms of the server's model, as many as the node's keep ratio affords. `evaluate` takes
    the model in evaluation mode. The other arguments, what it returns, and the errors are as for `train_message`.
    """
    _, model = _received(message, context, structure, device)
    metrics = evaluate(model.eval(), message.content[CONFIG])
    return Message(RecordDict({METRICS: metric_record(metrics)}), reply_to=message)


def _received(
    message: Message, context: Context, structure: nn.Module, device: torch.device | str
) -> tuple[Shard, nn.Module]:
    """Return the shard of a message and its model; keep the frozen part, if the message has it."""
    shard, config = unpack(Shard, message.content).to(device), part_of(message.content, CONFIG, ConfigRecord)
    if FROZEN in config:
        context.state[FROZEN] = ConfigRecord({FROZEN: config[FROZEN]})
    del message.content[ARRAYS]
    message.content[CONFIG] = settings(config)
    frozen = None
    if shard.frozen_digest:
        try:
            frozen = Frozen.from_bytes(part_of(context.state, FROZEN, ConfigRecord).get(FROZEN))
        except UserError as error:
            raise UserError(f"{LACKS} the frozen part of the model ({error})") from error
        if frozen.digest != shard.frozen_digest:
            raise UserError(f"{LACKS} the frozen part of the model: it has another one")
        frozen = frozen.to(device)
    return shard, client_model(structure, shard, copy=False, frozen=frozen)
