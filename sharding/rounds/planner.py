"""The planner: a model and the clients' keep ratios -> a Plan, from which each client's shard is cut.

Clients that can afford the same keep ratio form a group. For each group and layer the strategy gives π and ω, a
design is fitted to π once, and every client of the group draws from it with its own generator.
"""

import logging
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from math import inf

import numpy as np
import torch
from torch import Tensor, nn

from sharding.errors import UserError, join_first, lookup, safe_repr
from sharding.factorization import ENDS, Patterns, as_patterns, shardable_layers
from sharding.factorization.support import TO_SEND, check_supported
from sharding.layers import FactorizedLayer, factorized_type
from sharding.layers.base import factorized_layers, residual_layers
from sharding.layers.decomposition import check_layers, decompose_layers, form_of
from sharding.layers.tail import stacked_terms
from sharding.matrices.quantization import Format, check_format, quantize_terms
from sharding.matrices.spectrum import Spectrum
from sharding.matrices.values import find_nonfinite
from sharding.modules.copies import meta_copy
from sharding.modules.state import fixed_names, whole_state
from sharding.modules.wrappers import key, named_parameters, unwrap
from sharding.rng import generator, seed_of
from sharding.rounds.codec import CLIP, Terms
from sharding.rounds.frozen import Frozen
from sharding.rounds.optim import check_clip
from sharding.rounds.plan import Client, Draw, Plan, grouped
from sharding.rounds.shard import Shard
from sharding.terms.designs import DESIGNS, successive_design
from sharding.terms.designs.design import Design
from sharding.terms.strategies import Allocation, LayerContext, Strategy, get_strategy, norm_ratio, num_terms
from sharding.transport.compression import COMPRESSIONS, EXACT
from sharding.validation import as_whole, typed

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
        tail_format: the format in which a weak client holds terms that only stronger clients of a round train, frozen:
            ``int4``, ``int8``, ``bfloat16`` or ``float32``; None leaves them out. It is for strategies whose terms are
            nested, such as ``top_n``; the others have no tail.
        clip: τ ≥ 1 of all shards, see `sharding.clip_and_decay`; None for no clipping. Shards of a strategy that does
            not clip have None.

    Raises:
        UserError: unknown strategy, design, compression or format of the tail, the clip is below 1, or the seed is not
            a whole number of at least 0.
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
        tail_format: Format | None = "int4",
        clip: float | None = CLIP,
    ) -> None:
        lookup(COMPRESSIONS, compression, "compression")
        self._fit = lookup(DESIGNS, design, "design")
        self.strategy = get_strategy(strategy)
        self.design = design
        self.seed = as_whole(seed, "seed", least=0)
        self.skip, self.also = as_patterns(skip), as_patterns(also)
        self.compression = compression
        if tail_format is not None:
            check_format(tail_format, "tail_format")
        self.tail_format = tail_format if self.strategy.nested else None
        check_clip(clip)
        self.clip = clip if self.strategy.clips and clip != inf else None

    @typed
    def plan(
        self,
        model: nn.Module,
        keep_ratios: Mapping[Client, float],
        round: int = 0,
        layers: Mapping[str, nn.Module] | None = None,
        expected: Mapping[float, float] | None = None,
    ) -> Plan:
        """Draw the terms of each client.

        Every client of a round holds terms of the same layers, since each vector is averaged over those who hold it. So
        a layer is sent as terms also where ⌈N·r⌉ of them are more numbers than the whole, as above about r = 1/2 for a
        square matrix. (`factorize` leaves such a layer whole.) Where all clients can afford that much, `skip` it.

        Of a model that `factorize` made, the factorized layers are sharded, and `skip` and `also` do not matter. Their
        terms are those of the product UVᵀ. A client draws ⌈N·r⌉ of them, or all if there are fewer.

        Where parameters are frozen or layers have a residual, the shard names the `Frozen` that the client needs.

        Args:
            model: the server's model, dense or factorized; only read.
            keep_ratios: r of each client, in (0, 1].
            round: t.
            layers: the model's, as `checked_layers` returned them; by default they are chosen and checked now.
            expected: the expected number of clients of each keep ratio, where the plan must not tell who takes part: π
                is then that of this number, and the plan keeps each term that could be drawn.

        Returns:
            A `Plan`, whose clients are in the order of `keep_ratios`.

        Raises:
            UserError: a keep ratio outside (0, 1], a round that is not a whole number of at least 0, a weight that is
                sent whole and not finite, compression of a model that sends no weights in float32, or bfloat16
                compression of one that sends some in bfloat16, what cannot be sent, such as sparse and quantized
                tensors; or as `checked_layers`.
        """
        model, round = unwrap(model), as_whole(round, "round", least=0)
        layers = self.checked_layers(model) if layers is None else layers
        ratios = {client: self.strategy.keep_ratio or r for client, r in checked_ratios(keep_ratios).items()}
        groups = grouped(ratios)
        sizes: dict[float, float] = {ratio: len(clients) for ratio, clients in groups.items()}
        if expected is not None:
            sizes = {}
            for ratio, count in expected.items():
                sizes[self.strategy.keep_ratio or ratio] = sizes.get(self.strategy.keep_ratio or ratio, 0.0) + count

        drawn: dict[str, dict[float, Draw]] = {}

        def draw(name: str, of_all: Tensor) -> Tensor:
            """Draw every client's terms of a layer, and return all that are drawn."""
            magnitudes, form = of_all.cpu().numpy().copy(), form_of(layers[name])
            magnitudes.flags.writeable = False  # a strategy that writes to them would change what clients receive
            if not magnitudes.any():
                log.warning("layer %s is all zero; its terms get unit u and zero v, so that they can train", name)
            drawn[name] = of_layer = {}
            for ratio, size in sizes.items():
                n = min(num_terms(form.rank, ratio), form.num_terms)
                context = LayerContext(magnitudes, n, max(1, int(size + 0.5)), ratio)
                of_layer[ratio] = self._draw(name, context, groups.get(ratio, []), round)
            kept = [np.empty(0, np.int64), *(each.indices.ravel() for each in of_layer.values())]
            if expected is not None:
                kept += [np.flatnonzero(each.allocation.inclusion) for each in of_layer.values()]
            return torch.from_numpy(np.unique(np.concatenate(kept)))

        spectra = decompose_layers(layers, draw)
        draws = {(ratio, name): each for name in layers for ratio, each in drawn[name].items()}
        common = self._common(model, layers)
        common = replace(common, plan_id=f"{round}-{self._digest(round, spectra, common.whole)}")
        shapes = {
            key(name, part): getattr(layer, part).shape
            for name, layer in layers.items()
            for part in (("u", "v") if isinstance(layer, FactorizedLayer) else ("weight",))
        }
        return Plan(common, ratios, spectra, draws, shapes, self._tails(layers, spectra, sizes, draws))

    def nbytes(self, model: nn.Module, keep_ratio: float, strongest: float | None = None) -> int:
        """Return the bytes of a shard of this keep ratio in round 0, from the model's shapes alone.

        Raises:
            UserError: as `template`.
        """
        return self.template(model, keep_ratio, strongest).nbytes

    def template(self, model: nn.Module, keep_ratio: float, strongest: float | None = None) -> Shard:
        """Return a shard of this keep ratio in round 0 on the `meta` device: names, types and shapes, without a draw.

        Args:
            model: the server's model, of which no parameter's value is read.
            keep_ratio: r of the client.
            strongest: the largest r of the round's clients, on which the client's tail depends; r by default.

        Raises:
            UserError: as `plan`, except that no parameter's value is read.
        """
        keep_ratio = checked_ratios({0: keep_ratio})[0]
        check_supported(model, TO_SEND)
        model = meta_copy(model, residual_layers(model).values())
        layers = self.sharded_layers(model)
        common = self._common(model, layers)
        ratio = (self.strategy.keep_ratio or keep_ratio) if layers else 1.0
        terms, tail = {}, {}
        for name, layer in layers.items():
            form = form_of(layer)
            n, most = (min(num_terms(form.rank, each), form.num_terms) for each in (ratio, strongest or ratio))
            new = partial(torch.empty, dtype=form.dtype, device="meta")
            indices = new(n, dtype=torch.int64)
            terms[name] = Terms(indices, new(form.blocks * form.rows, n), new(form.blocks * form.columns, n), new(n))
            if self.tail_format is not None and most > n and _adds_tail(layer):
                count = form.blocks * (most - n)
                tail[name] = quantize_terms(new(count, form.rows), new(count, form.columns), self.tail_format)
        return replace(common, terms=terms, keep_ratio=ratio, plan_id=f"0-{0:016x}", tail=tail)

    def frozen(self, model: nn.Module) -> Frozen:
        """Return what each client needs once, besides its shards; without tensors where nothing is frozen."""
        return Frozen.of(model, self.sharded_layers(unwrap(model)))

    def sharded_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the layers whose terms are sent, by name; none where the strategy sends the whole model."""
        factorized = factorized_layers(model)
        if self.strategy.allocate is None:
            if factorized:
                raise UserError(
                    f"this strategy sends whole weights, and {join_first(list(factorized))} are factorized; "
                    "merge the model"
                )
            return {}
        return dict[str, nn.Module](factorized) or shardable_layers(model, self.skip, self.also)

    def checked_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """Return the layers whose terms are sent, by name, after a check that they have some.

        A server calls this once, and `plan` in each round without `layers`. Warns if no layer is sharded.

        Raises:
            UserError: an attention that has yet to be unpacked, what cannot be sent (lazy layers, scripted models), a
                weight on the meta device, a sharded weight that is not finite, factorized layers with multipliers other
                than 1, or factorized layers with the strategy ``dense``.
        """
        check_supported(model, TO_SEND)
        if empty := next((name for name, part in named_parameters(model) if part.is_meta), None):
            raise UserError(f"{empty} is on the meta device; pass a model with values")
        layers = self.sharded_layers(model)
        check_layers(layers)
        if self.strategy.allocate is not None and not layers:
            warnings.warn(
                f"no layer of this {type(unwrap(model)).__name__} is sharded: every client is sent the whole model, "
                "whatever its keep ratio; the report of `factorize(model, 0.1)` says what stays whole",
                stacklevel=4,
            )
        return layers

    def _draw(self, layer: str, context: LayerContext, clients: list[Client], round: int) -> Draw:
        """Draw the terms of clients of one keep ratio, each with its own generator."""
        allocation, design = self._allocate(layer, context)
        rows = [design.draw(generator(self.seed, "draw", round, client, layer)) for client in clients]
        indices = np.stack(rows) if rows else np.empty((0, context.num_terms), np.int64)
        multipliers = allocation.multipliers[indices]
        if self.strategy.rescales:
            scales = [norm_ratio(context.magnitudes, row) for row in indices]
            multipliers = np.broadcast_to(np.array(scales).reshape(-1, 1), indices.shape).copy()
        return Draw(context, allocation, indices, multipliers)

    def _common(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> Shard:
        """Return a shard without terms: what every client is sent besides them."""
        whole, frozen = whole_state(model, layers)
        values = {name: part for name, part in (whole | frozen).items() if not part.is_meta}  # a template has none
        if (spoiled := find_nonfinite(values)) is not None:
            raise UserError(
                f"{spoiled} has NaN or Inf; did training diverge? A mask can be a buffer with persistent=False"
            )
        if self.compression != EXACT:
            _check_compression(layers, whole, self.compression)
        whole = {name: part.clone() for name, part in whole.items()}  # the model moves on, shards are as they were
        residuals = residual_layers(model)
        digest = Frozen(residuals, frozen).digest if residuals or frozen else ""
        fixed = fixed_names(model, layers, whole)
        return Shard({}, whole, 1.0, fixed, "", self.compression, digest, clip=self.clip)

    def _tails(
        self,
        layers: Mapping[str, nn.Module],
        spectra: Mapping[str, Spectrum],
        ratios: Collection[float],
        draws: Mapping[tuple[float, str], Draw],
    ) -> dict[float, dict[str, Tensor]]:
        """Store, for each keep ratio and layer, the terms of the round that clients of the ratio do not train.

        A stronger client's tail is a view of the end of a weaker one's.
        """
        tails: dict[float, dict[str, Tensor]] = {ratio: {} for ratio in ratios}
        if self.tail_format is None or not ratios:
            return tails
        for name, spectrum in spectra.items():
            if not _adds_tail(layers[name]):
                continue
            trained = {ratio: draws[ratio, name].context.num_terms for ratio in ratios}
            fewest, total = min(trained.values()), len(spectrum.indices)
            if fewest == total:
                continue
            u, v = (stacked_terms(side, spectrum.blocks) for side in spectrum.cut(spectrum.indices[fewest:]))
            longest = quantize_terms(u, v, self.tail_format).unflatten(0, (spectrum.blocks, -1))
            for ratio, n in trained.items():
                if n < total:
                    tails[ratio][name] = longest[:, n - fewest :].flatten(0, 1)
        return tails

    def _digest(self, round: int, spectra: Mapping[str, Spectrum], whole: Mapping[str, Tensor]) -> str:
        """Return a digest that identifies the round, the run and the model, independent of the clients.

        A model is known by its spectra; by the sums of its tensors where nothing is sharded.
        """
        known = [spectrum.magnitudes.cpu().numpy() for spectrum in spectra.values()]
        known = known or [np.array([float(part.double().sum()) for part in whole.values()])]
        digest = blake2b(b"".join(values.tobytes() for values in known)).hexdigest()
        return f"{seed_of(self.seed, 'plan', round, digest):016x}"

    def _allocate(self, name: str, context: LayerContext) -> tuple[Allocation, Design]:
        assert self.strategy.allocate is not None
        try:
            allocation = self.strategy.allocate(context)
            if not isinstance(allocation, Allocation):
                raise UserError(f"the strategy returned {safe_repr(allocation)}; an Allocation(π, ω) is needed")
            allocation = allocation.checked(len(context.magnitudes), context.num_terms)
            if allocation.weights is None:
                return allocation, Design.fit(allocation.inclusion, self._fit)
            return allocation, successive_design(allocation.weights, context.num_terms)  # as published
        except UserError as error:
            raise UserError(f"layer {name}: {error}") from error


def checked_ratios(keep_ratios: Mapping[Client, float]) -> dict[Client, float]:
    """Return the keep ratios as floats, each as it is written: 0.2 in float32 is 0.2.

    Raise a UserError that names the first client with an invalid one.
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


def _check_compression(layers: Mapping[str, nn.Module], whole: Mapping[str, Tensor], compression: str) -> None:
    """Raise a `UserError` if a compression that rounds has nothing to round, or its type is one of the model's own."""
    terms = {form_of(layer).dtype for layer in layers.values()}
    if compression == "bfloat16" and torch.bfloat16 in terms | {part.dtype for part in whole.values()}:
        raise UserError(
            "compression='bfloat16' is for weights in float32; this model has some in bfloat16: leave it out"
        )
    if torch.float32 not in terms | {part.dtype for part in whole.values() if part.dim() > 1}:
        raise UserError(
            f"compression={compression!r} is for weights in float32; this model sends none in float32: leave it out"
        )
