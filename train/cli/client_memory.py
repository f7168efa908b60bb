"""The memory of a client's tensors, found by training a shard of random terms for two steps."""

from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sharding import Shard, ShardPlanner
from sharding.errors import UserError
from sharding.rounds.codec import Terms
from train.config.sections import LocalConfig
from train.data import Dataset, Split
from train.engines import Job
from train.engines.local_training import make_optimizer
from train.engines.sequential import SequentialEngine


@dataclass(frozen=True)
class ClientMemory:
    """Bytes of a client's tensors while it trains.

    Attributes:
        shard: the shard as it was received.
        frozen: the residual and frozen parameters.
        model: the parameters that the small model trains, and its buffers.
        gradients: the gradients of these parameters.
        optimizer: the state of the optimizer.
        activations: the activations with other intermediate results, at the peak.
    """

    shard: int
    frozen: int
    model: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(getattr(self, part.name) for part in fields(self))


def client_memory(
    planner: ShardPlanner,
    model: nn.Module,
    keep_ratio: float,
    strongest: float,
    dataset: Dataset,
    local: LocalConfig,
) -> ClientMemory:
    """Train a client of a keep ratio for two steps on samples of the test split, and count the bytes of its tensors.

    `strongest` is the largest r of all clients. Raise a UserError if the training fails.
    """
    frozen = planner.frozen(model)
    shard = random_shard(replace(planner.template(model, keep_ratio, strongest), frozen_digest=frozen.digest))
    samples = Split(*(part[: local.batch_size] for part in (dataset.test.inputs, dataset.test.targets)))
    local = local.model_copy(update={"steps": 2, "batch_size": len(samples)})
    engine = SequentialEngine(Job(model, {0: samples}, dataset, local, 0, frozen=frozen))
    with PeakMemory() as peak:
        update = engine.train_client(0, shard, 0, 0.0)
    if update.failure is not None:
        raise UserError(f"a client of keep ratio {keep_ratio:g} cannot train: {update.failure}")
    small = engine.resident(shard)
    frozen_nbytes = sum(part.nbytes for part in (*frozen.residuals.values(), *frozen.parameters.values()))
    trained = sum(tensor.nbytes for tensor in (*small.parameters(), *small.buffers())) - frozen_nbytes
    state = state_nbytes(small, local)
    gradients = sum(parameter.nbytes for parameter in small.parameters() if parameter.requires_grad)
    rest = peak.nbytes - trained - gradients - state
    return ClientMemory(shard.nbytes, frozen_nbytes, trained, gradients, state, rest)


def state_nbytes(model: nn.Module, local: LocalConfig) -> int:
    """Return the bytes of the optimizer's state, which a first step makes."""
    optimizer = make_optimizer(model, local, 0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    parts = (part for state in optimizer.state.values() for part in state.values())
    return sum(part.nbytes for part in parts if isinstance(part, Tensor))


def random_shard(template: Shard) -> Shard:
    """Return a shard with the names, types and shapes of one on the `meta` device."""
    terms = {}
    for name, part in template.terms.items():
        u, v = (0.01 * torch.randn(side.shape).to(side.dtype) for side in (part.u, part.v))
        n = part.indices.numel()
        terms[name] = Terms(torch.arange(n), u, v, torch.ones(n, dtype=part.multipliers.dtype))
    dense = {name: torch.ones_like(part, device="cpu") for name, part in template.whole.items()}
    tail = {name: torch.zeros_like(part, device="cpu") for name, part in template.tail.items()}
    return replace(template, terms=terms, whole=dense, tail=tail)


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors made in this context take at once, as `nbytes`."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note the memory of its results."""
        known = {
            tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in known and storage._cdata not in self._live:
                    self._live[storage._cdata] = storage.nbytes()
                    finalize(storage, self._live.pop, storage._cdata, None)
        self.nbytes = max(self.nbytes, sum(self._live.values()))
        return results
