"""A node: it holds one client's data, reports its keep ratio, and trains the shards that the server sends.

It has the model's structure without weights. Its samples are in a file that its operator names, or, for trials, a part
of a public dataset. Flower starts the app again for every message.
"""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from sharding import Shard, Update, init_empty
from sharding.client_sampling import SAMPLERS
from sharding.errors import UserError
from sharding.flower import query_message, train_message
from sharding.flower.messages import ARRAYS, CONFIG, METRICS, NODE, part_of, unpack
from train.config.schema import Config
from train.data import DATASETS, Dataset, Split, empty_dataset
from train.data.dataset import problem_of
from train.data.shares import Shares
from train.engines.local_training import train_locally
from train.engines.memory_format import keep_memory_format
from train.experiment.assembly import (
    assign_keep_ratios,
    data_options,
    find_device,
    make_model,
    partition_dataset,
    read_dataset,
)
from train.federate.messages import LOSS, LR, NORM, NUM_SAMPLES, ROUND, config_text, keep_config, norm_of, read_config

app = ClientApp()

KEPT = "kept"  # in a node's state, the plan of the update that it keeps


@app.query()
def introduce(message: Message, context: Context) -> Message:
    """Report which client this node is, its keep ratio, and its number of samples."""
    config, settings = keep_config(message, context), context.node_config
    ratios = assign_keep_ratios(config.keep_ratio, config.clients.count, config.seed_of_data)
    reply = query_message(message, context, keep_ratio=ratios.get(partition_of(settings)))
    reply.content[NODE][NUM_SAMPLES] = len(open_data(config, settings)[1])
    return reply


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train a shard on this node's data."""
    config, partition = keep_config(message, context), partition_of(context.node_config)
    torch.set_num_threads(config.threads)
    device, (dataset, data) = find_device(config.device), open_data(config, context.node_config)
    with init_empty():
        structure = make_model(config, dataset, pretrained=False)

    def fit(model: torch.nn.Module, values: ConfigRecord) -> dict[str, float]:
        key, lr, clip = (config.seed, values[ROUND], partition), values[LR], values["clip"]
        loss = train_locally(keep_memory_format(model), data.to(device), dataset, config.local, lr, clip, key)
        return {NUM_SAMPLES: len(data), LOSS: float(loss)}

    if not SAMPLERS[config.clients.sampler.name].needs_norms:
        return train_message(message, context, structure, fit, device=device)
    sent = unpack(Shard, message.content).to(device)
    reply = train_message(message, context, structure, fit, device=device)
    update = unpack(Update, reply.content).to(device)
    context.state.update({**reply.content, KEPT: ConfigRecord({"plan": sent.plan_id})})
    reply.content.clear()
    reply.content[METRICS] = MetricRecord({NORM: norm_of(sent, update, message.content[CONFIG][LR])})
    return reply


@app.train("upload")
def upload(message: Message, context: Context) -> Message:
    """Send the update that the node keeps; raise a UserError if it keeps none of this plan."""
    plan = part_of(message.content, CONFIG, ConfigRecord).get("plan")
    if KEPT not in context.state or context.state[KEPT]["plan"] != plan:
        raise UserError("it no longer has an update of this round: the node was restarted after training")
    return Message(RecordDict({name: context.state[name] for name in (ARRAYS, CONFIG, METRICS)}), reply_to=message)


def partition_of(settings: Mapping[str, Any]) -> int:
    """Return the client that this node is; raise a UserError if its configuration does not have a whole number."""
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

    Raise a UserError if they are missing or invalid, or the server does not name the classes: a node may lack some.
    """
    options = data_options(config)
    if options.get("task") != "causal_lm" and "classes" not in options:
        raise UserError(f"data={paths} may lack classes that others have; set data.classes=[…] at the server")
    fixed = {"train": paths, "test": None, "test_fraction": 0.0, "root": None, "client": None}
    dataset = DATASETS["files"](**options | fixed)
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
    """Read a node's own samples, or raise a UserError."""
    try:
        tensors = safetensors.torch.load_file(path)
        data = Split(tensors["inputs"], tensors["targets"])
        inputs, targets = len(data.inputs), len(data.targets)
    except (OSError, KeyError, TypeError, safetensors.SafetensorError) as error:  # TypeError: a scalar has no length
        raise UserError(f"data={path} cannot be read: {type(error).__name__}: {error}") from error
    if not 0 < targets == inputs:
        raise UserError(f"data={path} has {inputs} inputs and {targets} targets; their numbers must agree")
    return data
