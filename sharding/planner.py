"""The server's side of a round: spectra + budgets + generators -> one Shard per client.

Clients that can afford the same keep ratio form a group. For each group and layer the strategy gives π and ω, a
design is fitted to π once, and every client of the group draws from it with its own generator.
"""

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sharding.designs import DESIGNS, fit, successive_design
from sharding.designs.base import Design
from sharding.errors import UserError, pick, shown
from sharding.factorization import ENDS, Patterns, as_patterns, num_terms, shardable_layers
from sharding.layers import as_blocks, clear_padding, num_blocks
from sharding.modules.finite import computable, find_nonfinite
from sharding.modules.state import check_shapes, dense_state, frozen_names
from sharding.modules.wrappers import full_tensor, named_parameters, unwrap
from sharding.rng import generator, seed_of
from sharding.shard import Shard, Terms
from sharding.strategies import Allocation, LayerContext, Strategy, get_strategy, norm_ratio
from sharding.svd.spectrum import Spectrum, decompose
from sharding.transport.compression import COMPRESSIONS, EXACT, round_columns, round_outputs

log = logging.getLogger(__name__)

Client = int | str


@dataclass(frozen=True)
class Draw:
    """What the clients of one group drew from one layer.

    Attributes:
        context: the spectrum and budget it was drawn for.
        allocation: π and ω.
        indices: shape (C, n), each row ascending.
        multipliers: ω of the drawn terms, shape (C, n).
    """

    context: LayerContext
    allocation: Allocation
    indices: NDArray[np.int64]
    multipliers: NDArray[np.float64]


class Plan(Mapping[Client, Shard]):
    """A round's shards, by client, and what the server keeps.

    A shard is cut when you ask for it, and the plan does not keep it: all of them would be more than the model.

    Args:
        frames: each client's shard without terms; the others are the attributes.

    Attributes:
        spectra: of the sharded layers, by name, with the terms that some client of the round holds.
        groups: the clients of each keep ratio, in the order of the rows of the draws.
        draws: by (keep ratio, layer).
        dense: what is sent whole, as the server has it, before any rounding for the wire.
    """

    def __init__(
        self,
        frames: Mapping[Client, Shard],
        spectra: Mapping[str, Spectrum],
        groups: Mapping[float, list[Client]],
        draws: Mapping[tuple[float, str], Draw],
        dense: Mapping[str, Tensor],
    ) -> None:
        self.spectra = spectra
        self.groups = groups
        self.draws = draws
        self.dense = dense
        self._frames = frames
        self._rows = {client: (ratio, row) for ratio, its in groups.items() for row, client in enumerate(its)}
        self._drawn = {place: _rows(draw, spectra[place[1]]) for place, draw in draws.items()}

    def __getitem__(self, client: Client) -> Shard:
        """Cut a client's shard."""
        frame, (ratio, row) = self._frames[client], self._rows[client]
        terms = {}
        for name, spectrum in self.spectra.items():
            indices, multipliers = self._drawn[ratio, name][row]
            u, v = (round_columns(side, frame.compression) for side in spectrum.cut(indices))
            terms[name] = Terms(indices, u, v, multipliers)
        return replace(frame, terms=terms)

    def __contains__(self, client: object) -> bool:
        """Return whether there is a shard for this client."""
        return client in self._frames

    def __iter__(self) -> Iterator[Client]:
        """Iterate over the clients."""
        return iter(self._frames)

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._frames)

    @property
    def device(self) -> torch.device:
        """Where the shards are cut."""
        tensors = (*(spectrum.u for spectrum in self.spectra.values()), *self.dense.values())
        return tensors[0].device if tensors else torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """The bytes of all shards on the wire. Those of one keep ratio have the same size."""
        return sum(len(clients) * self[clients[0]].nbytes for clients in self.groups.values())

    def __repr__(self) -> str:
        size = self.nbytes / 1000
        return f"Plan(clients={len(self)}, layers={len(self.spectra)}, {size:,.0f} kB)"

    def values_of(self, update: Shard) -> Shard:
        """Return an update as new values: where it holds changes, from what the server has, not from what it sent.

        Args:
            update: of a shard of this plan, without a fault, on the spectra's device; its indices say which terms.
        """
        if update.compression == EXACT:
            return update
        terms = {}
        for layer, its in update.terms.items():
            u, v = self.spectra[layer].cut(its.indices)
            terms[layer] = replace(its, u=u + its.u, v=v + its.v)
        dense = {name: computable(self.dense[name]) + computable(its) for name, its in update.dense.items()}
        return replace(update, terms=terms, dense=dense, compression=EXACT)


class ShardPlanner:
    """Draws each client's singular terms.

    Args:
        strategy: a name in `sharding.STRATEGIES`, or a `Strategy` of your own.
        design: a name in `sharding.DESIGNS`. The PriSM strategies ignore it and draw successively, as published.
        seed: draws depend only on (seed, round, client, layer).
        skip: layers sent whole, as in `sharding.factorize`; by default the first and the last.
        also: layers to shard that are sent whole by default, such as embeddings; as in `sharding.factorize`.
        compression: a name in `sharding.COMPRESSIONS`: how numbers travel; see `sharding.transport.compression`.

    Raises:
        UserError: unknown strategy, design or compression.
    """

    def __init__(
        self,
        strategy: str | Strategy = "collective",
        design: str = "cps",
        seed: int = 0,
        skip: Patterns = ENDS,
        *,
        also: Patterns = (),
        compression: str = EXACT,
    ) -> None:
        pick(COMPRESSIONS, compression, "compression")
        pick(DESIGNS, design, "design")
        self.strategy = get_strategy(strategy)
        self.design = design
        self.seed = seed
        self.skip, self.also = as_patterns(skip), as_patterns(also)
        self.compression = compression

    def plan(self, model: nn.Module, budgets: Mapping[Client, float], round: int = 0) -> Plan:
        """Cut one shard for each client.

        Every client of a round holds terms of the same layers, since each vector is averaged over those who hold it. So
        a layer is sent as terms also where ⌈N·r⌉ of them are more numbers than the whole, as above about r = 1/2 for a
        square matrix. (`factorize` leaves such a layer whole.) Where all clients can afford that much, `skip` it.

        Args:
            model: the server's dense model; only read.
            budgets: the keep ratio r of each client, in (0, 1].
            round: t.

        Returns:
            A `Plan`, that is a dict from client to `Shard`, in the order of `budgets`.

        Raises:
            UserError: a keep ratio outside (0, 1], a weight that is not finite, an attention that has yet to be
                unpacked, bfloat16 compression of a model in bfloat16, or what cannot be sent: lazy, sparse and
                quantized layers, scripted models.
        """
        _check_budgets(budgets)
        model = unwrap(model)
        check_shapes(model)
        _check_compression(model, self.compression)
        _check_values(model)
        layers = {} if self.strategy.allocate is None else shardable_layers(model, self.skip, self.also)
        if self.strategy.allocate is not None and not layers:
            warnings.warn(
                f"no layer of this {type(model).__name__} is sharded: every client is sent the whole model, whatever "
                "its keep ratio; the report of `factorize(model, 0.1)` says what stays whole",
                stacklevel=2,
            )
        groups, draws = self._group(budgets), {}

        def draw(name: str, magnitudes: Tensor) -> Tensor:
            values = magnitudes.cpu().numpy().copy()
            values.flags.writeable = False  # a strategy that writes to them would change what clients receive
            drawn = self._draw(name, values, groups, round)
            draws.update(drawn)
            return _held(drawn.values())

        spectra = decompose({name: _matrix(layer) for name, layer in layers.items()}, draw)
        for name, spectrum in spectra.items():
            clear_padding(layers[name], spectrum.u)
        draws = {(ratio, name): draws[ratio, name] for ratio in groups for name in layers}
        dense = dense_state(model, layers)
        if (spoiled := find_nonfinite(dense)) is not None:
            raise UserError(
                f"{spoiled} has NaN or Inf; did training diverge? A mask can be a buffer with persistent=False"
            )
        frozen = frozen_names(model, layers, dense)
        ratios = {client: ratio if layers else 1.0 for ratio, clients in groups.items() for client in clients}
        plan = f"{round}-{self._digest(round, spectra, dense)}"
        rest = {name: round_outputs(tensor, self.compression) for name, tensor in dense.items()}
        frames = {client: Shard({}, rest, ratios[client], frozen, plan, self.compression) for client in budgets}
        return Plan(frames, spectra, groups, draws, dense)

    def _digest(self, round: int, spectra: Mapping[str, Spectrum], dense: Mapping[str, Tensor]) -> str:
        """Return a digest that identifies the round, the run and the model, independent of the clients.

        A model is known by its spectra; by the sums of its tensors where nothing is sharded.
        """
        known = [spectrum.magnitudes.cpu().numpy() for spectrum in spectra.values()]
        known = known or [np.array([float(part.double().sum()) for part in dense.values()])]
        digest = blake2b(b"".join(values.tobytes() for values in known)).hexdigest()
        return f"{seed_of(self.seed, 'plan', round, digest):016x}"

    def _group(self, budgets: Mapping[Client, float]) -> dict[float, list[Client]]:
        """Put clients of one keep ratio together."""
        groups: dict[float, list[Client]] = {}
        for client, ratio in budgets.items():
            groups.setdefault(self.strategy.keep_ratio or ratio, []).append(client)
        return groups

    def _draw(
        self, name: str, magnitudes: NDArray[np.float64], groups: Mapping[float, list[Client]], round: int
    ) -> dict[tuple[float, str], Draw]:
        """Draw from one layer for all groups, by (keep ratio, layer)."""
        if not magnitudes.any():
            log.warning("layer %s is all zero; its terms get unit u and zero v, so that they can train", name)
        draws = {}
        for ratio, clients in groups.items():
            context = LayerContext(magnitudes, num_terms(len(magnitudes), ratio), len(clients), ratio)
            draws[ratio, name] = self._draw_group(name, context, clients, round)
        return draws

    def _draw_group(self, name: str, context: LayerContext, clients: list[Client], round: int) -> Draw:
        allocation, design = self._allocate(name, context)
        indices = np.stack([design.draw(generator(self.seed, "draw", round, client, name)) for client in clients])
        multipliers = allocation.multipliers[indices]
        if self.strategy.rescales:
            scales = [norm_ratio(context.magnitudes, row) for row in indices]
            multipliers = np.broadcast_to(np.array(scales)[:, None], indices.shape).copy()
        return Draw(context, allocation, indices, multipliers)

    def _allocate(self, name: str, context: LayerContext) -> tuple[Allocation, Design]:
        assert self.strategy.allocate is not None
        try:
            allocation = self.strategy.allocate(context)
            if not isinstance(allocation, Allocation):
                raise UserError(f"the strategy returned {shown(allocation)}; an Allocation(π, ω) is needed")
            allocation = allocation.checked(len(context.magnitudes), context.num_terms)
            if allocation.weights is None:
                return allocation, fit(allocation.inclusion, self.design)
            return allocation, successive_design(allocation.weights, context.num_terms)  # as published
        except UserError as error:
            raise UserError(f"layer {name}: {error}") from error


def _held(draws: Iterable[Draw]) -> Tensor:
    """Return the indices of the terms that at least one client drew, ascending."""
    return torch.from_numpy(
        np.unique(np.concatenate([np.empty(0, np.int64), *(draw.indices.ravel() for draw in draws)]))
    )


def _rows(draw: Draw, spectrum: Spectrum) -> list[tuple[Tensor, Tensor]]:
    """Return each client's indices and multipliers where the spectrum is, ω in its dtype."""
    indices = torch.from_numpy(draw.indices).to(spectrum.u.device)
    multipliers = torch.from_numpy(draw.multipliers).to(spectrum.u)
    return list(zip(indices, multipliers, strict=True))


def _matrix(layer: nn.Module) -> Tensor:
    """Return the layer's weight as blocks (blocks, out, in); most layers have one."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return as_blocks(full_tensor(weight).detach(), num_blocks(layer))


def _check_budgets(budgets: Mapping[Client, float]) -> None:
    """Raise a `UserError` that names the first client with an invalid keep ratio."""
    if not isinstance(budgets, Mapping):
        raise UserError(f"the keep ratios are a {type(budgets).__name__}; pass a mapping from client to keep ratio")
    for client, ratio in budgets.items():
        try:
            num_terms(1, ratio)
        except UserError as error:
            raise UserError(f"client {shown(client)}: {error}") from error


def _check_values(model: nn.Module) -> None:
    if empty := next((name for name, part in named_parameters(model) if part.is_meta), None):
        raise UserError(f"{empty} is on the meta device; pass a model with values")


def _check_compression(model: nn.Module, compression: str) -> None:
    """Raise a `UserError` if compressed numbers and the model's own would have the same type."""
    if compression == "bfloat16" and any(
        part.dtype == torch.bfloat16 for part in (*model.parameters(), *model.buffers())
    ):
        raise UserError(
            "compression='bfloat16' is for weights in float32; this model has some in bfloat16: leave it out"
        )
