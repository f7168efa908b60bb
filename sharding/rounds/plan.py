"""A round's plan: who takes part, what each client drew, and how a client's shard is cut from it."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sharding.matrices.spectrum import Spectrum
from sharding.matrices.values import computable
from sharding.rounds.codec import Terms
from sharding.rounds.shard import Shard, Update
from sharding.terms.strategies import Allocation, LayerContext
from sharding.transport.compression import EXACT, round_columns, round_outputs

Client = int | str


@dataclass(frozen=True)
class Draw:
    """What the clients of one group drew from one layer.

    Attributes:
        context: the spectrum and budget it was drawn for.
        allocation: π and ω.
        indices: the numbers of the terms, shape (C, n), each row ascending.
        multipliers: ω of the drawn terms, shape (C, n).
    """

    context: LayerContext
    allocation: Allocation
    indices: NDArray[np.int64]
    multipliers: NDArray[np.float64]


class Plan(Collection[Client]):
    """A round's clients, what each of them drew, and what the server keeps.

    Iterate over the clients, and cut a client's shard by `shard`. The plan does not keep shards: all of them would be
    more than the model.

    Args:
        common: a shard without terms: what every client of the round is sent besides them.
        keep_ratios: r of each client that the terms are drawn for; the other arguments are the attributes.

    Attributes:
        id: ``<round>-<digest>``; an update names the plan that it belongs to.
        spectra: the spectra of the sharded layers, by name, with the terms that some client of the round holds or,
            with privacy, that some client could hold.
        draws: the draws, by (keep ratio, layer).
        groups: the clients of each keep ratio, in the order of the rows of the draws.
        shapes: the shapes of the sharded layers' weights or factors, by name.
        tails: the stored terms that only stronger clients train, by keep ratio and layer; empty where there are none.
        whole: the tensors that are sent whole, as the server has them, before any rounding for the wire.
        fixed: the names of layers and of what is sent whole that nobody trains.
    """

    def __init__(
        self,
        common: Shard,
        keep_ratios: Mapping[Client, float],
        spectra: Mapping[str, Spectrum],
        draws: Mapping[tuple[float, str], Draw],
        shapes: Mapping[str, torch.Size],
        tails: Mapping[float, Mapping[str, Tensor]],
    ) -> None:
        self.id, self.whole, self.fixed = common.plan_id, common.whole, common.fixed
        self.spectra, self.draws, self.shapes, self.tails = spectra, draws, shapes, tails
        self.groups = grouped(keep_ratios)
        if common.compression != EXACT:
            rounded = {name: round_outputs(part, common.compression) for name, part in self.whole.items()}
            common = replace(common, whole=rounded)
        self._common = common
        self._keep_ratios = keep_ratios
        self._rows = {client: row for clients in self.groups.values() for row, client in enumerate(clients)}
        self._drawn: dict[tuple[float, str], list[tuple[Tensor, Tensor]]] = {}
        for (ratio, layer), draw in draws.items():
            indices, multipliers = torch.from_numpy(draw.indices), torch.from_numpy(draw.multipliers)
            u = spectra[layer].u
            self._drawn[ratio, layer] = list(zip(indices.to(u.device), multipliers.to(u), strict=True))

    def shard(self, client: Client) -> Shard:
        """Cut a client's shard: copy its terms, and round them for the wire.

        Raises:
            KeyError: the client is not in the plan.
        """
        terms, compression = {}, self._common.compression
        for name, (indices, multipliers) in self._drawn_by(client):
            u, v = self.spectra[name].cut(indices)
            if compression != EXACT:
                u, v = round_columns(u, compression), round_columns(v, compression)
            terms[name] = Terms(indices, u, v, multipliers)
        return self._with_terms(client, terms)

    def shards(self) -> Iterator[tuple[Client, Shard]]:
        """Cut every client's shard, one after the other."""
        return ((client, self.shard(client)) for client in self)

    def template(self, client: Client) -> Shard:
        """Return a client's shard with u and v on the `meta` device: names, types, shapes and indices, for no work.

        Raises:
            KeyError: the client is not in the plan.
        """
        terms = {}
        for name, (indices, multipliers) in self._drawn_by(client):
            spectrum = self.spectra[name]
            u, v = (side.new_empty((len(side), len(indices)), device="meta") for side in (spectrum.u, spectrum.v))
            terms[name] = Terms(indices, u, v, multipliers)
        return self._with_terms(client, terms)

    def update_nbytes(self, client: Client) -> int:
        """Return the bytes of a client's update on the wire.

        Raises:
            KeyError: the client is not in the plan.
        """
        return self._update_sizes[self._keep_ratios[client]]

    @cached_property
    def _update_sizes(self) -> dict[float, int]:
        """The bytes of an update by keep ratio; those of one ratio have the same size."""
        return {ratio: self.template(clients[0]).update_nbytes for ratio, clients in self.groups.items()}

    def _drawn_by(self, client: Client) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Return an iterator over the layers, with the indices and multipliers of a client's terms."""
        ratio, row = self._keep_ratios[client], self._rows[client]
        return ((name, self._drawn[ratio, name][row]) for name in self.spectra)

    def _with_terms(self, client: Client, terms: Mapping[str, Terms]) -> Shard:
        ratio = self._keep_ratios[client]
        return replace(self._common, terms=terms, keep_ratio=ratio if terms else 1.0, tail=self.tails[ratio])

    def __contains__(self, client: object) -> bool:
        """Return whether there is a shard for this client."""
        return client in self._keep_ratios

    def __iter__(self) -> Iterator[Client]:
        """Iterate over the clients, in the order in which they were planned."""
        return iter(self._keep_ratios)

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._keep_ratios)

    @property
    def device(self) -> torch.device:
        """Where the shards are cut."""
        tensors = (*(spectrum.u for spectrum in self.spectra.values()), *self.whole.values())
        return tensors[0].device if tensors else torch.device("cpu")

    @cached_property
    def nbytes(self) -> int:
        """The bytes of all shards on the wire. Those of one keep ratio have the same size."""
        return sum(len(clients) * self.template(clients[0]).nbytes for clients in self.groups.values())

    def __repr__(self) -> str:
        size = self.nbytes / 1000
        return f"Plan(clients={len(self)}, layers={len(self.spectra)}, {size:,.0f} kB)"

    def values_of(self, update: Update) -> Update:
        """Return an update as new values: where it holds changes, from what the server has, not from what it sent.

        Args:
            update: an update of a shard of this plan, without a fault, on the spectra's device; its indices say which.
        """
        if not update.changes:
            return update
        terms = {}
        for layer, change in update.terms.items():
            u, v = self.spectra[layer].cut(change.indices)
            terms[layer] = replace(change, u=u + change.u, v=v + change.v)
        whole = {name: computable(self.whole[name]) + computable(change) for name, change in update.whole.items()}
        return replace(update, terms=terms, whole=whole, compression=EXACT, changes=False)

    def tail_indices(self, client: Client) -> dict[str, Tensor]:
        """Return, by layer, the indices of the terms that a client holds frozen: all of the round after its own."""
        ratio = self._keep_ratios[client]
        return {
            layer: self.spectra[layer].indices[self.draws[ratio, layer].context.num_terms :]
            for layer in self.tails[ratio]
        }


def grouped(keep_ratios: Mapping[Client, float]) -> dict[float, list[Client]]:
    """Put clients of one keep ratio together."""
    groups: dict[float, list[Client]] = {}
    for client, ratio in keep_ratios.items():
        groups.setdefault(ratio, []).append(client)
    return groups
