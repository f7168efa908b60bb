"""A node: it holds one client's data, reports its keep ratio, and trains the shards that the server sends.

It has the model's structure without weights. Its samples are in a file that its operator names, or, for trials, a part
of a public dataset. Flower starts the app again for every message.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from sharding import init_empty
from sharding.client_sampling import SAMPLERS
from sharding.errors import UserError
from sharding.strategies import get_strategy
from train.assembly import assign_keep_ratios, data_options, find_device, make_model, partition_dataset, read_dataset
from train.config.schema import Config
from train.data import DATASETS, Dataset, Split, empty_dataset
from train.data.dataset import problem_of
from train.data.shares import Shares
from train.engines import Job, Update
from train.engines.sequential import SequentialEngine
from train.federate.messages import (
    RESIDUAL,
    NodeInfo,
    TrainRequest,
    config_text,
    norm_of,
    read_config,
    read_residual,
    reply_record,
)

app = ClientApp()


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Report which client this node is, its keep ratio, and its number of samples."""
    config, settings = read_config(message.content["values"]["config"]), context.node_config
    partition = partition_of(settings)
    ratios = assign_keep_ratios(config.keep_ratio, config.clients.count, config.seed_of_data)
    ratio = settings.get("keep-ratio", ratios.get(partition))
    _, data = open_data(config, settings)
    return Message(NodeInfo(partition, ratio, len(data)).to_record(), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train a shard on this node's data."""
    request = TrainRequest.from_record(message.content)
    partition = partition_of(context.node_config)
    torch.set_num_threads(request.config.threads)
    device, residual = find_device(request.config.device), request.residual
    if residual is not None:
        context.state[RESIDUAL] = message.content[RESIDUAL]
    elif request.shard.residual and RESIDUAL in context.state:
        residual = read_residual(context.state)
    job = make_job(request.config, context.node_config)
    engine = SequentialEngine(job if residual is None else replace(job, residual=residual.to(device)))
    request = replace(request, shard=request.shard.to(device))
    update = engine.train_client(partition, request.shard, request.round, request.lr)
    if SAMPLERS[request.config.clients.sampler.name].needs_norms and update.shard is not None:
        return Message(store_update(context.state, request, update), reply_to=message)
    return Message(reply_record(update), reply_to=message)


@app.train("upload")
def upload(message: Message, context: Context) -> Message:
    """Send the stored update."""
    return Message(pop_update(context.state, message.content["wanted"]["plan"]), reply_to=message)


def store_update(state: RecordDict, request: TrainRequest, update: Update) -> RecordDict:
    """Keep an update in the state that Flower holds for this node, in place of an earlier one; return its norm."""
    assert update.shard is not None
    state.update(reply_record(update))
    state["held"] = ConfigRecord({"plan": request.shard.plan})
    return RecordDict({"report": ConfigRecord({"norm": norm_of(request.shard, update.shard, request.lr)})})


def pop_update(state: RecordDict, plan: str) -> RecordDict:
    """Return the kept update, as `reply_record` makes it.

    Raises:
        UserError: no update of this plan is stored.
    """
    if "held" not in state or state["held"]["plan"] != plan:
        raise UserError("it no longer has an update of this round: the node was restarted after training")
    return RecordDict({"shard": state["shard"], "values": state["values"]})


def make_job(config: Config, settings: Mapping[str, Any]) -> Job:
    """Return the model's structure and the data of one client."""
    dataset, data = open_data(config, settings)
    device = find_device(config.device)
    with init_empty():
        model = make_model(config, dataset, pretrained=False)
    clip = config.local.clip if get_strategy(config.strategy).clips else None
    return Job(model, {partition_of(settings): data.to(device)}, dataset, config.local, clip, config.seed)


def partition_of(settings: Mapping[str, Any]) -> int:
    """Return the client that this node is.

    Raises:
        UserError: the node's configuration does not have a whole number.
    """
    partition = settings.get("partition-id")
    if not isinstance(partition, int):
        raise UserError(f"partition-id={partition!r} in --node-config; set the number of this node's client, from 0")
    return partition


def open_data(config: Config, settings: Mapping[str, Any]) -> tuple[Dataset, Split]:
    """Return the dataset without its samples, and the samples of this node.

    `data` in the node's configuration is a safetensors file with raw `inputs` and `targets`, as in `train.data.Split`.
    With `data=files` on the server it is a file, a glob or a folder as that dataset reads them.
    Without it the node cuts its part out of the dataset that the server names, under `data-root` if that is set.

    Raises:
        UserError: a file or dataset is missing or invalid, or there are more nodes than clients.
    """
    if "data" in settings and config.data.name == "files":
        return read_files(config, str(settings["data"]))
    if "data" in settings:
        dataset, data = empty_dataset(config.data.name, **config.data.options), read_data(Path(str(settings["data"])))
        if problem := problem_of(dataset, data):
            raise UserError(f"data={settings['data']} {problem}")
        return dataset, data
    partition = partition_of(settings)
    dataset, shares = share_out_once(config_text(config), settings.get("data-root"))
    if partition not in shares:
        raise UserError(f"partition-id={partition} has no data; there are clients 0 to {len(shares) - 1}")
    data = shares[partition]
    return dataset, Split(data.inputs.clone(), data.targets.clone())


def read_files(config: Config, paths: str) -> tuple[Dataset, Split]:
    """Return the dataset `files` without its samples, and those that a node has in files of its own.

    Raises:
        UserError: they are missing or invalid, or the server does not name the classes, of which a node may lack some.
    """
    options = data_options(config)
    if options.get("task") != "causal_lm" and "classes" not in options:
        raise UserError(f"data={paths} may lack classes that others have; set data.classes=[…] at the server")
    own = {"train": paths, "test": None, "test_fraction": 0.0, "root": None, "client": None}
    dataset = DATASETS["files"](**options | own)
    return dataset.without_samples(), dataset.train


@lru_cache(maxsize=1)
def share_out_once(config: str, root: str | None) -> tuple[Dataset, Shares]:
    """Return the dataset without its training split, and all clients' samples.

    They are cached, since one process of Flower's simulation is many nodes in turn.
    """
    ours = read_config(config)
    dataset = read_dataset(ours, **({} if root is None else {"root": root}))
    return dataset.without_training(), partition_dataset(ours, dataset)


def read_data(path: Path) -> Split:
    """Read a node's own samples.

    Raises:
        UserError: they cannot be read.
    """
    try:
        held = safetensors.torch.load_file(path)
        data = Split(held["inputs"], held["targets"])
        inputs, targets = len(data.inputs), len(data.targets)
    except (OSError, KeyError, TypeError, safetensors.SafetensorError) as error:  # TypeError: a scalar has no length
        raise UserError(f"data={path} cannot be read: {type(error).__name__}: {error}") from error
    if not 0 < targets == inputs:
        raise UserError(f"data={path} has {inputs} inputs and {targets} targets; their numbers must agree")
    return data


def write_data(path: Path, data: Split) -> None:
    """Write one client's samples as `read_data` reads them."""
    safetensors.torch.save_file({"inputs": data.inputs.contiguous(), "targets": data.targets.contiguous()}, path)
