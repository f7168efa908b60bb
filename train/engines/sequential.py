"""The reference engine: one client after the other, on one resident model per shard size.

Shards are copied into the resident model, so memory does not grow with the number of clients.
"""

from copy import deepcopy
from functools import cache
from secrets import randbits

import torch
from torch import Tensor, nn

from sharding import Plan, Shard, UserError, client_model
from sharding.layers.base import factorized_layers
from sharding.modules.checkpointing import checkpoint_blocks
from sharding.rounds.failures import one_line
from sharding.rounds.plan import Client
from train.engines.engine import Engine, Job, Replies, Reply
from train.engines.local_training import train_locally
from train.engines.memory_format import keep_memory_format

UnsentBuffer = tuple[nn.Module, str, Tensor | None]  # its module, name and value


class SequentialEngine(Engine):
    """Trains the clients one by one, in the order of the plan."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._residents: dict[float | None, tuple[nn.Module, list[UnsentBuffer]]] = {}

    def train(self, plan: Plan, round: int, lr: float) -> Replies:
        """Yield the clients' replies."""
        for client, shard in plan.shards():
            yield client, self.train_client(client, shard, round, lr)

    def train_client(self, client: Client, shard: Shard, round: int, lr: float) -> Reply:
        """Train one client on its shard."""
        job = self.job
        try:
            shard = shard.to(job.device)  # a worker's comes from the CPU
            model = self.resident(shard)
            shard.load_into(model)
            for layer in factorized_layers(model).values():
                layer.dequantize_tail()  # the same numbers in each step; a device has no memory for this
            key, lr = (job.seed, round, client), job.lr(client, lr)
            loss = train_locally(model, job.clients[client], job.dataset, job.local, lr, shard.clip, key)
            return Reply(shard.read_from(model), loss)
        except Exception as error:
            return Reply.of_error(client, round, error)

    def resident(self, shard: Shard) -> nn.Module:
        """Return the model that shards of this one's keep ratio are trained in, with unsent buffers as in a new one."""
        size = shard.keep_ratio if shard.terms else None  # without terms all layers are whole
        if size not in self._residents:
            model = resident_model(self.job, shard)
            self._residents[size] = model, unsent_buffers(model)
        model, buffers = self._residents[size]
        for module, name, value in buffers:
            module._buffers[name] = None if value is None else value.clone()
        return model


def resident_model(job: Job, shard: Shard) -> nn.Module:
    """Build the model in which shards of this one's keep ratio are trained, checkpointed and compiled as configured."""
    model = keep_memory_format(client_model(job.model, shard, frozen=job.frozen))
    if job.local.checkpoint:
        checkpoint_blocks(model)
    if job.local.compile:  # at the first full batch; dropout draws what it draws without
        model.compile(dynamic=False, options={"fallback_random": True})
    return model


@cache
def check_compiler(device: torch.device) -> None:
    """Raise a UserError if `torch.compile` does not work here, as where g++ is missing: each client would miss it."""
    number = randbits(32)  # compiled by no earlier process
    try:
        torch.compile(lambda x: x * number)(torch.ones(2, device=device))
    except Exception as error:
        raise UserError(
            f"local.compile=true needs a compiler that works, such as g++: install it, or set local.compile=false "
            f"({one_line(error)})"
        ) from error


def unsent_buffers(model: nn.Module) -> list[UnsentBuffer]:
    """Return a copy of each buffer with `persistent=False`, which a forward pass may change."""
    named = [(module, name) for module in model.modules() for name in sorted(module._non_persistent_buffers_set)]
    return [(module, name, deepcopy(module._buffers[name])) for module, name in named]
