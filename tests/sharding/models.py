"""A small model and a round with it, shared by the tests of the library."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD

from sharding import Plan, Server, Shard, ShardPlanner, Update, init_empty
from sharding.matrices.spectrum import Spectrum, decompose
from sharding.modules.wrappers import named_modules
from sharding.rounds.aggregation.aggregate import Outcome
from sharding.rounds.codec import Terms


def make_net() -> nn.Sequential:
    """A net with three sharded layers (two convolutions, one linear) between whole ends."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1, bias=False),
        nn.Flatten(),
        nn.Linear(128, 10),
        nn.Linear(10, 3),
    )


def on_meta(build):
    with torch.device("meta"):
        return build()


def make_skeleton(build):
    with init_empty():
        return build()


KINDS = {"meta": on_meta, "skeleton": make_skeleton, "dense": lambda build: build()}  # of a model's structure


def make_plan(model: nn.Module, budgets: dict, strategy: str = "collective", round: int = 0, seed: int = 0) -> Plan:
    """Plan one round."""
    return ShardPlanner(strategy, seed=seed).plan(model, budgets, round)


def perturbed(shard: Shard, seed: int) -> Update:
    """What training might make of a shard: the same terms, other values."""
    rng = torch.Generator().manual_seed(seed)

    def noisy(tensor):
        return tensor + torch.randn(tensor.shape, generator=rng, dtype=tensor.dtype)

    terms = {n: Terms(t.indices, noisy(t.u), noisy(t.v), t.multipliers) for n, t in shard.terms.items()}
    dense = {name: noisy(tensor) for name, tensor in shard.whole.items()}
    changes = shard.compression != "float32"
    return Update(terms, dense, shard.keep_ratio, shard.plan_id, shard.compression, changes, shard.frozen_digest)


def unchanged(shard: Shard) -> Update:
    """The update of a client that trained nothing."""
    return shard.returned(shard.trained())


def along(sent: Shard, after: Update, factor: float) -> Update:
    """The update that goes `factor` times as far as `after` from what was sent."""
    values = after.trained()
    return sent.returned({name: part + factor * (values[name] - part) for name, part in sent.trained().items()})


def aggregate(
    model: nn.Module,
    plan: Plan,
    updates: Mapping | Iterable[tuple],
    num_samples: Mapping,
    total: float | None = None,
    server_lr: float = 1.0,
    max_share: float = 1.0,
) -> Outcome:
    """Average updates into a model; those of a mapping in the order of the plan."""
    weights = list(model.parameters())
    sharded = [part for name, part in named_modules(model) if name in plan.spectra]  # whatever its planner's patterns
    skip = [lambda name, layer: layer not in sharded]
    planner = ShardPlanner("full" if plan.spectra else "dense", skip=skip, also="*")
    server = Server(model, planner, SGD(weights, lr=server_lr) if weights else None, max_share=max_share)
    average = server.average(plan, num_samples, total)
    if isinstance(updates, Mapping):
        order = [*plan, *(client for client in updates if client not in plan)]
        updates = [(client, updates[client]) for client in order if client in updates]
    for client, update in updates:
        average.add(client, update)
    return server.step(average)


def decompose_one(matrix: Tensor) -> Spectrum:
    """Decompose a single matrix (out, in)."""
    return decompose({"": matrix})[""]


def spectra_of(model: nn.Module, plan: Plan) -> dict[str, Spectrum]:
    """All terms of every sharded layer."""
    return {name: decompose_one(model.get_submodule(name).weight.detach().flatten(1)) for name in plan.spectra}
