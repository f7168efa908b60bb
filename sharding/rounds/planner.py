"""The planner: a model and the clients' keep ratios -> a Plan, from which each client's shard is cut.

Clients that can afford the same keep ratio form a group. For each group and layer the strategy gives π and ω, a
design is fitted to π once, and every client of the group draws from it with its own generator.
"""

import logging
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sharding.errors import UserError, join_first, lookup, safe_repr
from sharding.factorization import ENDS, Patterns, as_patterns, num_terms, shardable_layers
from sharding.factorization.support import TO_SEND, check_supported
from sharding.layers import FactorizedLayer, clear_padding, factorized_type
from sharding.layers.decomposition import check_layers, decompose_layers, form_of, group_layers
from sharding.layers.tail import stacked_terms
from sharding.matrices.quantization import Format, check_format, quantize_terms
from sharding.matrices.spectrum import Spectrum, map_threads
from sharding.modules.copies import meta_copy
from sharding.modules.finite import find_nonfinite
from sharding.modules.memory import release_freed_memory
from sharding.modules.state import dense_state, frozen_names
from sharding.modules.wrappers import named_modules, named_parameters, unwrap
from sharding.rng import generator, seed_of
from sharding.rounds.codec import CLIP
from sharding.rounds.optim import check_clip
from sharding.rounds.plan import Client, Draw, Plan
from sharding.rounds.residual import Residual, residual_layers
from sharding.rounds.shard import Shard, Terms
from sharding.terms.designs import DESIGNS, fit, successive_design
from sharding.terms.designs.design import Design
from sharding.terms.strategies import Allocation, LayerContext, Strategy, get_strategy, norm_ratio
from sharding.transport.compression import COMPRESSIONS, EXACT, round_outputs

log = logging.getLogger(__name__)


class ShardPlanner:
    """Draws each client's singular terms.

    Args:
        strategy: a name in `sharding.STRATEGIES`, or a `Strategy` of your own.
        design: a name in `sharding.DESIGNS`. The PriSM strategies ignore it and draw successively, as published.
        seed: draws depend only on (seed, round, client, layer).
        skip: layers sent whole, as in `sharding.factorize`; by default the first and the last.
        also: layers to shard that are sent whole by default, such as embeddings; as in `sharding.factorize`.
        compression: a name in `sharding.COMPRESSIONS`: how numbers travel; see `sharding.transport.compression`.
        tail: the format in which a weak client also holds the terms that only stronger clients of the round train,
            frozen: ``int4``, ``int8``, ``bfloat16`` or ``float32``; None leaves them out. It is for strategies whose
            terms are nested, such as ``top_n``; the others have no tail.
        clip: τ ≥ 1 of all shards, see `sharding.clip_and_decay`; None for no clipping. Shards of a strategy that does
            not clip have None.

    Raises:
        UserError: unknown strategy, design, compression or format of the tail, or the clip is below 1.
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
        tail: Format | None = "int4",
        clip: float | None = CLIP,
    ) -> None:
        lookup(COMPRESSIONS, compression, "compression")
        lookup(DESIGNS, design, "design")
        self.strategy = get_strategy(strategy)
        self.design = design
        self.seed = seed
        self.skip, self.also = as_patterns(skip), as_patterns(also)
        self.compression = compression
        if tail is not None:
            check_format(tail, "tail")
        self.tail = tail if self.strategy.nested else None
        check_clip(clip)
        self.clip = clip if self.strategy.clips and clip != inf else None

    def plan(self, model: nn.Module, keep_ratios: Mapping[Client, float], round: int = 0) -> Plan:
        """Draw the terms of each client.

        Every client of a round holds terms of the same layers, since each vector is averaged over those who hold it. So
        a layer is sent as terms also where ⌈N·r⌉ of them are more numbers than the whole, as above about r = 1/2 for a
        square matrix. (`factorize` leaves such a layer whole.) Where all clients can afford that much, `skip` it.

        Of a model that `factorize` made, the factorized layers are sharded, and `skip` and `also` do not matter. Their
        terms are those of the product UVᵀ. A client draws ⌈N·r⌉ of them, or all if there are fewer.

        Where parameters are frozen or layers have a residual, the shard names the `residual` that the client needs.

        Args:
            model: the server's model, dense or factorized; only read.
            keep_ratios: r of each client, in (0, 1].
            round: t.

        Returns:
            A `Plan`, whose clients are in the order of `keep_ratios`.

        Raises:
            UserError: a keep ratio outside (0, 1], a weight that is not finite, an attention that has yet to be
                unpacked, compression of a model that sends no weights in float32, or bfloat16 compression of one that
                sends some in bfloat16, or what cannot be sent: lazy, sparse and quantized layers, scripted models; or
                factorized layers with multipliers other than 1, or with the strategy ``dense``.
        """
        keep_ratios = _checked_ratios(keep_ratios)
        model = unwrap(model)
        check_supported(model, TO_SEND)
        if empty := next((name for name, part in named_parameters(model) if part.is_meta), None):
            raise UserError(f"{empty} is on the meta device; pass a model with values")
        layers = self.sharded_layers(model)
        if self.strategy.allocate is not None and not layers:
            warnings.warn(
                f"no layer of this {type(model).__name__} is sharded: every client is sent the whole model, whatever "
                "its keep ratio; the report of `factorize(model, 0.1)` says what stays whole",
                stacklevel=2,
            )
        groups = self._group(keep_ratios)
        spectra, draws = self._plan_layers(layers, groups, round)
        dense, frozen_dense = dense_state(model, layers)
        dense = {name: tensor.clone() for name, tensor in dense.items()}  # the model moves on, shards are as they were
        _check_compression(layers, dense, self.compression)
        if (spoiled := find_nonfinite(dense | frozen_dense)) is not None:
            raise UserError(
                f"{spoiled} has NaN or Inf; did training diverge? A mask can be a buffer with persistent=False"
            )
        frozen = frozen_names(model, layers, dense)
        ratios = {client: ratio if layers else 1.0 for ratio, clients in groups.items() for client in clients}
        id = f"{round}-{self._digest(round, spectra, dense)}"
        rest = {name: round_outputs(tensor, self.compression) for name, tensor in dense.items()}
        digest = Residual.of(model, layers).digest
        header = Shard({}, rest, 1.0, frozen, id, self.compression, digest, clip=self.clip)
        headers = {client: replace(header, keep_ratio=ratios[client]) for client in keep_ratios}
        shapes = {name: layer.weight.shape for name, layer in layers.items() if isinstance(layer.weight, Tensor)}
        return Plan(id, headers, spectra, groups, draws, dense, shapes, self._tails(layers, spectra, groups, draws))

    def nbytes(self, model: nn.Module, keep_ratio: float, strongest: float | None = None) -> int:
        """Return the bytes of a shard of this keep ratio in round 0, from the model's shapes alone.

        Raises:
            UserError: as `template`.
        """
        return self.template(model, keep_ratio, strongest).nbytes

    def template(self, model: nn.Module, keep_ratio: float, strongest: float | None = None) -> Shard:
        """Return a shard of this keep ratio in round 0 on the `meta` device: names, types and shapes, without a draw.

        Args:
            model: the server's model, of which no value is read.
            keep_ratio: r of the client.
            strongest: the largest r of the round's clients, on which the client's tail depends; r by default.

        Raises:
            UserError: as `plan`, except that no value is read.
        """
        keep_ratio = _checked_ratios({0: keep_ratio})[0]
        check_supported(model, TO_SEND)
        model = meta_copy(model, residual_layers(model).values())
        layers = self.sharded_layers(model)
        dense, _ = dense_state(model, layers)
        _check_compression(layers, dense, self.compression)
        ratio = (self.strategy.keep_ratio or keep_ratio) if layers else 1.0
        terms, tail = {}, {}
        for name, layer in layers.items():
            form = form_of(layer)
            n, most = (min(num_terms(form.rank, each), form.num_terms) for each in (ratio, strongest or ratio))
            new = partial(torch.empty, dtype=form.dtype, device="meta")
            indices = new(n, dtype=torch.int64)
            terms[name] = Terms(indices, new(form.blocks * form.rows, n), new(form.blocks * form.columns, n), new(n))
            if self.tail is not None and most > n and _adds_tail(layer):
                count = form.blocks * (most - n)
                tail[name] = quantize_terms(new(count, form.rows), new(count, form.columns), self.tail)
        frozen = frozen_names(model, layers, dense)
        digest = Residual.of(model, layers).digest
        return Shard(terms, dense, ratio, frozen, f"0-{0:016x}", self.compression, digest, tail, self.clip)

    def residual(self, model: nn.Module) -> Residual:
        """Return what each client needs once, besides its shards; without tensors where nothing is frozen."""
        return Residual.of(model, self.sharded_layers(unwrap(model)))

    def sharded_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the layers whose terms are sent, by name; none where the strategy sends the whole model."""
        factorized = {name: part for name, part in named_modules(model) if isinstance(part, FactorizedLayer)}
        if self.strategy.allocate is None:
            if factorized:
                raise UserError(
                    f"this strategy sends whole weights, and {join_first(list(factorized))} are factorized; "
                    "merge the model"
                )
            return {}
        return {**factorized} or shardable_layers(model, self.skip, self.also)

    def _plan_layers(
        self, layers: Mapping[str, nn.Module], groups: Mapping[float, list[Client]], round: int
    ) -> tuple[dict[str, Spectrum], dict[tuple[float, str], Draw]]:
        """Decompose every layer, draw its terms for all groups, and keep the vectors of those that somebody drew."""
        check_layers(layers)

        def plan_batch(names: list[str]) -> list[tuple[Spectrum, list[Draw]]]:
            planned = []
            decompositions = decompose_layers([layers[name] for name in names])
            for name, decomposition in zip(names, decompositions, strict=True):
                magnitudes = decomposition.magnitudes.cpu().numpy().copy()
                draws = self._draw(name, magnitudes, form_of(layers[name]).rank, groups, round)
                drawn = np.concatenate([np.empty(0, np.int64), *(draw.indices.ravel() for draw in draws)])
                spectrum = decomposition.keep(torch.from_numpy(np.unique(drawn)))
                clear_padding(layers[name], spectrum.u)
                planned.append((spectrum, draws))
            del decomposition
            release_freed_memory()
            return planned

        batches = group_layers(layers)
        planned = {
            name: result
            for names, results in zip(batches, map_threads(plan_batch, batches), strict=True)
            for name, result in zip(names, results, strict=True)
        }
        draws = {(ratio, name): draw for name in layers for ratio, draw in zip(groups, planned[name][1], strict=True)}
        return {name: planned[name][0] for name in layers}, draws

    def _tails(
        self,
        layers: Mapping[str, nn.Module],
        spectra: Mapping[str, Spectrum],
        groups: Mapping[float, list[Client]],
        draws: Mapping[tuple[float, str], Draw],
    ) -> dict[float, dict[str, Tensor]]:
        """Store, for each keep ratio and layer, the terms of the round that clients of the ratio do not train.

        Those of a stronger client are the last of a weaker one's, and share its memory, but where a layer has groups.
        """
        tails: dict[float, dict[str, Tensor]] = {ratio: {} for ratio in groups}
        if self.tail is None or not groups:
            return tails
        for name, spectrum in spectra.items():
            if not _adds_tail(layers[name]):
                continue
            trained = {ratio: draws[ratio, name].context.num_terms for ratio in groups}
            fewest, total = min(trained.values()), len(spectrum.indices)
            if fewest == total:
                continue
            u, v = (stacked_terms(side, spectrum.blocks) for side in spectrum.cut(spectrum.indices[fewest:]))
            longest = quantize_terms(u, v, self.tail).unflatten(0, (spectrum.blocks, -1))
            for ratio, n in trained.items():
                if n < total:
                    tails[ratio][name] = longest[:, n - fewest :].flatten(0, 1)
        return tails

    def _digest(self, round: int, spectra: Mapping[str, Spectrum], dense: Mapping[str, Tensor]) -> str:
        """Return a digest that identifies the round, the run and the model, independent of the clients.

        A model is known by its spectra; by the sums of its tensors where nothing is sharded.
        """
        known = [spectrum.magnitudes.cpu().numpy() for spectrum in spectra.values()]
        known = known or [np.array([float(part.double().sum()) for part in dense.values()])]
        digest = blake2b(b"".join(values.tobytes() for values in known)).hexdigest()
        return f"{seed_of(self.seed, 'plan', round, digest):016x}"

    def _group(self, keep_ratios: Mapping[Client, float]) -> dict[float, list[Client]]:
        """Put clients of one keep ratio together."""
        groups: dict[float, list[Client]] = {}
        for client, ratio in keep_ratios.items():
            groups.setdefault(self.strategy.keep_ratio or ratio, []).append(client)
        return groups

    def _draw(
        self, name: str, magnitudes: NDArray[np.float64], rank: int, groups: Mapping[float, list[Client]], round: int
    ) -> list[Draw]:
        """Draw from one layer of this rank for each group; there are fewer magnitudes where the terms are."""
        if not magnitudes.any():
            log.warning("layer %s is all zero; its terms get unit u and zero v, so that they can train", name)
        magnitudes.flags.writeable = False  # a strategy that writes to them would change what clients receive
        return [
            self._draw_group(
                name,
                LayerContext(magnitudes, min(num_terms(rank, ratio), len(magnitudes)), len(clients), ratio),
                clients,
                round,
            )
            for ratio, clients in groups.items()
        ]

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
                raise UserError(f"the strategy returned {safe_repr(allocation)}; an Allocation(π, ω) is needed")
            allocation = allocation.checked(len(context.magnitudes), context.num_terms)
            if allocation.weights is None:
                return allocation, fit(allocation.inclusion, self.design)
            return allocation, successive_design(allocation.weights, context.num_terms)  # as published
        except UserError as error:
            raise UserError(f"layer {name}: {error}") from error


def _checked_ratios(keep_ratios: Mapping[Client, float]) -> dict[Client, float]:
    """Return the keep ratios as floats, each as it is written: 0.2 in float32 is 0.2.

    Raises:
        UserError: one is invalid; the message names the first client that has such a ratio.
    """
    if not isinstance(keep_ratios, Mapping):
        raise UserError(f"keep_ratios is a {type(keep_ratios).__name__}; pass a mapping from client to keep ratio")
    for client, ratio in keep_ratios.items():
        try:
            num_terms(1, ratio)
        except UserError as error:
            raise UserError(f"client {safe_repr(client)}: {error}") from error
    return {client: float(r if isinstance(r, float) else str(r)) for client, r in keep_ratios.items()}


def _adds_tail(layer: nn.Module) -> bool:
    """Whether a client's form of a sharded layer can have a tail."""
    kind = type(layer) if isinstance(layer, FactorizedLayer) else factorized_type(layer)
    return kind is not None and kind.adds_residual


def _check_compression(layers: Mapping[str, nn.Module], dense: Mapping[str, Tensor], compression: str) -> None:
    """Raise a `UserError` if a compression rounds nothing that is sent, or its type is one of the model's own."""
    terms = {form_of(layer).dtype for layer in layers.values()}
    if compression == "bfloat16" and torch.bfloat16 in terms | {part.dtype for part in dense.values()}:
        raise UserError(
            "compression='bfloat16' is for weights in float32; this model has some in bfloat16: leave it out"
        )
    if compression != EXACT and torch.float32 not in terms | {part.dtype for part in dense.values() if part.dim() > 1}:
        raise UserError(
            f"compression={compression!r} is for weights in float32; this model sends none in float32: leave it out"
        )
