"""The servers of the methods that are compared: what a client receives, and how updates are averaged.

All send `Shard`s, so clients train alike and bytes are counted alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from sharding import (
    FactorizedLayer,
    Frozen,
    Plan,
    Server,
    Shard,
    ShardPlanner,
    Update,
    draw_terms,
    merge,
    optimal_inclusion,
)
from sharding.matrices.quantization import format_of, quantize
from sharding.matrices.spectrum import compose, decompose
from sharding.modules.state import whole_state
from sharding.modules.wrappers import named_modules, named_parameters
from sharding.rng import Key, generator, seed_of
from sharding.rounds.plan import Client
from sharding.rounds.shard import Terms
from sharding.terms.strategies import num_terms
from studies.peers.aggregation import Aggregate, flora, hetlora


class MethodServer(ABC):
    """A method's server.

    Attributes:
        model: with the server's values.
        structure: of the clients' models, from which `client_model` makes them.
        planner: plans shards of the size of this method's.
    """

    model: nn.Module
    structure: nn.Module
    planner: ShardPlanner

    @property
    def frozen(self) -> Frozen:
        """What is frozen on every client."""
        return Frozen.of(self.model)

    @property
    def stored(self) -> Frozen:
        """What is frozen as a client receives and stores it."""
        return self.frozen

    @property
    def first_nbytes(self) -> int:
        """The bytes that a client receives once, on first contact."""
        return self.stored.nbytes if len(self.stored) else 0

    @abstractmethod
    def shards(self, ratios: Mapping[Client, float], t: int) -> Iterator[tuple[Client, Shard]]:
        """Yield each client's shard of round t."""

    @abstractmethod
    def step(self, updates: Mapping[Client, Update], samples: Mapping[Client, float]) -> None:
        """Average the updates of the round, and take the average as the new model."""

    def sent_nbytes(self, shard: Shard, since: int | None, t: int) -> int:
        """Return the bytes that a client receives in round t, without those of first contact.

        Args:
            shard: of the client.
            since: the last round in which it took part; None for never.
            t: the round.
        """
        return shard.nbytes


class ShardServer(MethodServer):
    """The library's server: ours on a residual, dense FedAvg, or a model of which only a part trains.

    Args:
        model: factorized, or dense for the strategy ``dense``.
        planner: draws the terms.
        redraw: draw L anew from the terms of W = R + L every so many rounds, from round 0 on; 0 for never.
    """

    def __init__(self, model: nn.Module, planner: ShardPlanner, structure: nn.Module, redraw: int = 0) -> None:
        self.model, self.structure, self.redraw = model, structure, redraw
        self.server, self.planner = Server(model, planner), planner
        self.plan: Plan | None = None

    def shards(self, ratios: Mapping[Client, float], t: int) -> Iterator[tuple[Client, Shard]]:
        """Yield each client's shard of round t."""
        if self.redraw and t % self.redraw == 0:
            redraw_terms(self.model, self.planner.seed, t)
        self.plan = self.server.plan(ratios, t)
        return self.plan.shards()

    def step(self, updates: Mapping[Client, Update], samples: Mapping[Client, float]) -> None:
        """Average the updates, and take the average as the new model."""
        assert self.plan is not None
        average = self.server.average(self.plan, {client: samples[client] for client in self.plan})
        for client in self.plan:
            average.add(client, updates.get(client))
        self.server.step(average)

    def sent_nbytes(self, shard: Shard, since: int | None, t: int) -> int:
        """Return the bytes of the shard, and of R if L was drawn anew since the client took part."""
        is_new = bool(self.redraw) and since is not None and since // self.redraw < t // self.redraw
        return shard.nbytes + (Frozen(self.frozen.residuals).nbytes if is_new else 0)


class HeadServer(ShardServer):
    """FedAvg of the last layer, on weights that are frozen in the residual's format and computed with as dense ones.

    Args:
        start: factorized on a residual.
        model: dense, with pretrained values.
        head: the name of the last layer.
    """

    def __init__(self, start: nn.Module, model: nn.Module, head: str) -> None:
        base = lora_start(start, model, 0)
        frozen = merge(base)
        for name, parameter in frozen.named_parameters():
            parameter.requires_grad_(name.startswith(f"{head}."))
        super().__init__(frozen, ShardPlanner("dense"), frozen)
        residuals, parameters = Frozen.of(base).residuals, Frozen.of(frozen).parameters
        rest = {name: part for name, part in parameters.items() if name.removesuffix(".weight") not in residuals}
        self._stored = Frozen(residuals, rest)

    @property
    def stored(self) -> Frozen:
        """The frozen weights in their format."""
        return self._stored


class LoraServer(MethodServer):
    """A server of LoRA on a frozen base: a client of rank n has the first n columns of the global factors.

    Args:
        start: factorized on a residual, with the rank of the strongest client; it becomes the server's model.
        model: dense, with pretrained values. The base is its weights in the residual's format.
        aggregate: averages the factors.
        seed: of LoRA's start.
    """

    def __init__(self, start: nn.Module, model: nn.Module, aggregate: Aggregate, seed: int) -> None:
        self.structure, self.aggregate, self.seed = model, aggregate, seed
        self.planner = ShardPlanner("top_n")
        self.model = lora_start(start, model, seed)

    @property
    def layers(self) -> dict[str, FactorizedLayer]:
        """The layers with factors, by name."""
        return factorized(self.model)

    def shards(self, ratios: Mapping[Client, float], t: int) -> Iterator[tuple[Client, Shard]]:
        """Yield each client's first columns of the factors, and what all train."""
        digest = self.frozen.digest
        dense, _ = whole_state(self.model, self.layers)
        for client, ratio in ratios.items():
            yield client, Shard(self.terms(client, ratio, t), dense, ratio, plan_id=str(t), frozen_digest=digest)

    def terms(self, client: Client, ratio: float, t: int) -> dict[str, Terms]:
        """Return the factors from which a client starts in round t, by layer."""
        return {name: first_columns(layer, ratio) for name, layer in self.layers.items()}

    @torch.no_grad()
    def step(self, updates: Mapping[Client, Update], samples: Mapping[Client, float]) -> None:
        """Average the factors as the method does, and everything else by samples; without updates nothing moves."""
        if not updates:
            return
        total = sum(samples[client] for client in updates)
        weights = [samples[client] / total for client in updates]
        for name, layer in self.layers.items():
            factors = [(shard.terms[name].u.double(), shard.terms[name].v.double()) for shard in updates.values()]
            self.take(layer, *self.aggregate(factors, weights))
        parameters = dict(named_parameters(self.model))
        for name in next(iter(updates.values())).whole:
            values = torch.stack([shard.whole[name].double() for shard in updates.values()])
            parameters[name].copy_(torch.einsum("k,k...->...", torch.tensor(weights, dtype=torch.float64), values))

    def take(self, layer: FactorizedLayer, u: Tensor, v: Tensor) -> None:
        """Take the averaged factors of a layer."""
        set_factors(layer, u, v)


class HetloraServer(LoraServer):
    """HetLoRA: columns that no client of a round has stay as they are.

    Padded with zeros they would be zero in B and in A, and never get a gradient again.
    """

    def __init__(self, start: nn.Module, model: nn.Module, seed: int) -> None:
        super().__init__(start, model, hetlora, seed)

    def take(self, layer: FactorizedLayer, u: Tensor, v: Tensor) -> None:
        """Take the averaged factors, and keep the other columns."""
        sides = ((layer.u, u), (layer.v, v))
        u, v = (torch.cat([new, old.detach()[:, new.shape[1] :].double()], dim=1) for old, new in sides)
        super().take(layer, u, v)


class FloraServer(LoraServer):
    """FLoRA: the stacked factors are merged into every client's base, and each client starts from new random factors.

    `main.py` of ATP-1010/FederatedLLM, commit 7bea158: a new adapter for each client in each round, a merge after it,
    in float32. A merge into fewer bits would round. There each stack goes to all clients (issue 4 of that repository).
    Here one that comes back receives the stacks of the rounds since it last took part, or the base if that is less.
    """

    def __init__(self, start: nn.Module, model: nn.Module, seed: int) -> None:
        super().__init__(start, model, flora, seed)
        self.stacks: list[int] = []  # bytes, by round

    def terms(self, client: Client, ratio: float, t: int) -> dict[str, Terms]:
        """Return new factors, which the client draws itself."""
        start_factors(self.layers, self.seed, t, client)
        return super().terms(client, ratio, t)

    def step(self, updates: Mapping[Client, Update], samples: Mapping[Client, float]) -> None:
        """Stack the factors and merge them into the base."""
        super().step(updates, samples)
        terms = {}
        for name, layer in self.layers.items():
            n = sum(shard.terms[name].indices.numel() for shard in updates.values())
            sizes = (n,), (len(layer.u), n), (len(layer.v), n), (n,)
            terms[name] = Terms(*(torch.empty(size, device="meta") for size in sizes))
        self.stacks.append(Shard(terms, {}).nbytes)

    def take(self, layer: FactorizedLayer, u: Tensor, v: Tensor) -> None:
        """Merge the product into the base."""
        assert layer.residual is not None
        layer.residual += (u @ v.mT).to(layer.residual.dtype)

    def sent_nbytes(self, shard: Shard, since: int | None, t: int) -> int:
        """Return the bytes of what all train, and of the stacks since the client took part, or of the base."""
        rest = Shard({}, shard.whole, plan_id=shard.plan_id, frozen_digest=shard.frozen_digest).nbytes
        missed = 0 if since is None else sum(self.stacks[since:t])
        return rest + min(missed, Frozen(self.stored.residuals).nbytes)


@torch.no_grad()
def lora_start(start: nn.Module, model: nn.Module, seed: int) -> nn.Module:
    """Let the residual of a factorized model be the whole weight, and its factors LoRA's start, in place."""
    layers = factorized(start)
    for name, layer in layers.items():
        assert layer.residual is not None
        weight = model.get_submodule(name).get_parameter("weight").detach().flatten(1)
        layer.residual.copy_(quantize(weight, format_of(layer.residual)))
    start_factors(layers, seed, 0)
    return start


@torch.no_grad()
def start_factors(layers: Mapping[str, FactorizedLayer], seed: int, *key: Key) -> None:
    """Set B to zero and A to uniform numbers below 1/√in, as PEFT does; seed and key choose the numbers."""
    for name, layer in layers.items():
        random = torch.Generator().manual_seed(seed_of(seed, "lora", *key, name))
        layer.u.zero_()
        layer.v.uniform_(-1, 1, generator=random).mul_(len(layer.v) ** -0.5)


def set_factors(layer: FactorizedLayer, u: Tensor, v: Tensor) -> None:
    """Give a layer these factors, of any number of terms."""
    layer.u, layer.v = (nn.Parameter(side.to(layer.u.dtype)) for side in (u, v))
    layer.multipliers = torch.ones(u.shape[1], dtype=layer.u.dtype)


def first_columns(layer: FactorizedLayer, ratio: float) -> Terms:
    """Return the first ⌈N·r⌉ columns of a layer's factors."""
    n = num_terms(min(len(layer.u), len(layer.v)), ratio)
    u, v = (side.detach()[:, :n].clone() for side in (layer.u, layer.v))
    return Terms(torch.arange(n), u, v, torch.ones(n, dtype=u.dtype))


@torch.no_grad()
def redraw_terms(model: nn.Module, seed: int, t: int) -> None:
    """Draw L anew among the terms of W = R + L, with the inclusion of Theorem 3.1, and let R be the rest, in place."""
    for name, layer in factorized(model).items():
        assert layer.residual is not None
        weight = layer.to_dense().get_parameter("weight").flatten(1)
        (spectrum,) = decompose({name: weight}).values()
        inclusion = optimal_inclusion(spectrum.magnitudes.numpy(), layer.num_terms)
        u, v = spectrum.cut(torch.from_numpy(draw_terms(inclusion, rng=generator(seed, "redraw", t, name))))
        layer.u.copy_(u)
        layer.v.copy_(v)
        rest = weight.double() - compose(u.double(), v.double())
        layer.residual.copy_(quantize(rest, format_of(layer.residual)))


def factorized(model: nn.Module) -> dict[str, FactorizedLayer]:
    """Return the factorized layers of a model, by name."""
    return {name: part for name, part in named_modules(model) if isinstance(part, FactorizedLayer)}
