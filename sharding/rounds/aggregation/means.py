"""Averages of a round, vector by vector: the weighted mean, summed as updates arrive, and the trimmed mean.

The trimmed mean of n numbers leaves out the lowest and the highest ⌈βn⌉ of them (but never all), so that a few outliers
have no influence. It is taken per coordinate over the clients that train the vector, with the weights of the values
that are left: Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018, Definition 2. Where one or two clients
train a vector, nothing is left out, and it is the plain mean. Clients that hold the vector frozen are then averaged in:
if their equal values were trimmed with the others, they could leave out all others.
"""

from collections.abc import Iterator, Mapping
from math import ceil
from typing import Protocol

import torch
from torch import Tensor

from sharding.matrices.spectrum import Spectrum, compose
from sharding.rounds.shard import Terms, Update

STRIP = 256  # rows of a weight that move at once: in float64 a whole layer is twice its size


class Mean(Protocol):
    """An average of updates that arrive one by one.

    Attributes:
        weight: of all updates so far.
    """

    weight: float

    def add(self, update: Update, weight: float, frozen: Mapping[str, Tensor]) -> None:
        """Add an update of values, and by layer the indices of the terms that its client holds as they were sent."""

    def dense(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the mean of every dense tensor times `weight`, float64, once."""

    def vectors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the means ū and v̄ of every sharded layer's kept terms, in the form of its spectrum, float64, once.

        Each vector is averaged over the clients that hold it; a vector that nobody trains is the spectrum's own.
        """


class RunningMean:
    """Sums in float64, so that memory does not grow with the cohort. Updates must be on the device of the spectra."""

    def __init__(self, spectra: Mapping[str, Spectrum]) -> None:
        self.weight = 0.0
        self._spectra = spectra
        self._dense: dict[str, Tensor] = {}
        self._layers: dict[str, _Sums] = {}

    def add(self, update: Update, weight: float, frozen: Mapping[str, Tensor]) -> None:
        """Add an update to the sums."""
        self.weight += weight
        for name, tensor in update.dense.items():
            if name in self._dense:
                self._dense[name].add_(tensor.double(), alpha=weight)  # float8 is not promoted
            else:
                self._dense[name] = tensor.double() * weight
        for name, terms in update.terms.items():
            if name not in self._layers:
                self._layers[name] = _Sums(self._spectra[name])
            self._layers[name].add(terms.indices, terms.u, terms.v, weight)
            if name in frozen:
                self._layers[name].hold(frozen[name], weight)

    def dense(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the sums of the dense tensors, and forget them."""
        for name in list(self._dense):
            yield name, self._dense.pop(name)

    def vectors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the means of every layer's vectors, and forget their sums."""
        for name in list(self._layers):
            yield name, *self._layers.pop(name).means()


class _Sums:
    """Running sums of one layer's vectors, and of the weights behind each."""

    def __init__(self, spectrum: Spectrum) -> None:
        self._kept = spectrum
        self._u = torch.zeros_like(spectrum.u, dtype=torch.float64)
        self._v = torch.zeros_like(spectrum.v, dtype=torch.float64)
        self._weights = torch.zeros(spectrum.u.shape[1], dtype=torch.float64, device=spectrum.u.device)
        self._frozen = torch.zeros_like(self._weights)  # of the clients that hold each term as it was sent

    def add(self, indices: Tensor, u: Tensor, v: Tensor, weight: float) -> None:
        columns = self._kept.columns(indices)
        self._weights[columns] += weight
        for sums, part in ((self._u, u), (self._v, v)):
            sums.index_add_(1, columns, part.double() * weight)

    def hold(self, indices: Tensor, weight: float) -> None:
        self._frozen[self._kept.columns(indices)] += weight

    def means(self) -> tuple[Tensor, Tensor]:
        """Return ū and v̄ in the memory of the sums."""
        trained, mixed = self._weights > 0, (self._weights > 0) & (self._frozen > 0)
        total = self._weights + self._frozen
        for sums, kept in ((self._u, self._kept.u), (self._v, self._kept.v)):
            sums[:, mixed] += kept[:, mixed].double() * self._frozen[mixed]
            sums.div_(total.where(trained, total.new_ones(())))
            sums[:, ~trained] = kept[:, ~trained].double()
        return self._u, self._v


class TrimmedMean:
    """Keeps all updates until the mean is taken.

    Args:
        spectra: of the sharded layers.
        trim: β in (0, 1/2), the share of the values that is left out at each end.
    """

    def __init__(self, spectra: Mapping[str, Spectrum], trim: float) -> None:
        self.weight = 0.0
        self._spectra, self._trim = spectra, trim
        self._updates: list[tuple[Update, float]] = []
        self._frozen: dict[str, Tensor] = {}  # by layer, the weight of the clients that hold each term frozen

    def add(self, update: Update, weight: float, frozen: Mapping[str, Tensor]) -> None:
        """Keep an update."""
        self.weight += weight
        self._updates.append((update, weight))
        for name, indices in frozen.items():
            spectrum = self._spectra[name]
            weights = self._frozen.setdefault(name, torch.zeros_like(spectrum.indices, dtype=torch.float64))
            weights[spectrum.columns(indices)] += weight

    def dense(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the trimmed means times the weight of all."""
        for name in self._updates[0][0].dense if self._updates else ():
            values = torch.stack([update.dense[name].double() for update, _ in self._updates], dim=-1)
            weights = values.new_tensor([weight for _, weight in self._updates])
            yield name, trimmed_mean(values, weights, self._trim) * self.weight

    def vectors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the trimmed means of every layer's vectors."""
        for name in self._updates[0][0].terms if self._updates else ():
            spectrum = self._spectra[name]
            frozen = self._frozen.get(name, torch.zeros_like(spectrum.indices, dtype=torch.float64))
            updates = [(update.terms[name], weight) for update, weight in self._updates]
            yield (name, *self._means(spectrum, updates, frozen))

    def _means(self, spectrum: Spectrum, updates: list[tuple[Terms, float]], frozen: Tensor) -> tuple[Tensor, Tensor]:
        """Return ū and v̄; terms that as many clients train are averaged together."""
        indices = spectrum.columns(torch.cat([terms.indices for terms, _ in updates]))
        weights = torch.cat([spectrum.magnitudes.new_full(terms.indices.shape, weight) for terms, weight in updates])
        counts, order = indices.bincount(minlength=spectrum.u.shape[1]), indices.argsort(stable=True)
        starts = counts.cumsum(0) - counts
        sides = []
        for part, kept in (("u", spectrum.u), ("v", spectrum.v)):
            columns = torch.cat([getattr(terms, part) for terms, _ in updates], dim=1).double()
            side = kept.to(torch.float64, copy=True)
            for count in counts[counts > 0].unique().tolist():
                terms = torch.nonzero(counts == count)[:, 0]
                holders = order[starts[terms, None] + torch.arange(count, device=indices.device)]  # (terms, holders)
                trained = weights[holders].sum(dim=1)
                share = trained / (trained + frozen[terms])  # 1 where nobody holds a term frozen
                mean = trimmed_mean(columns[:, holders], weights[holders], self._trim)
                side[:, terms] = side[:, terms].lerp(mean, share)
            sides.append(side)
        return sides[0], sides[1]


def weight_change(spectrum: Spectrum, u: Tensor, v: Tensor) -> Tensor:
    """Return Σ (ū v̄ᵀ − u' v'ᵀ), shape (out, in), in the type of the spectrum; zero where no vector has changed.

    It is (ū − u') v̄ᵀ + u' (v̄ − v')ᵀ, in float64, computed a strip of rows at a time.

    Args:
        spectrum: the layer's, with the terms that have means.
        u: ū, in the form of the spectrum, float64.
        v: v̄ likewise.
    """
    new_u, old_u = (side.unflatten(0, (spectrum.blocks, -1)) for side in (u, spectrum.u))
    blocks, rows, _ = old_u.shape
    change, v_change = old_u.new_empty(blocks, rows, len(v) // blocks), v - spectrum.v
    for start in range(0, rows, STRIP):
        strip = slice(start, start + STRIP)
        before = old_u[:, strip].flatten(0, 1).double()
        moved = compose(new_u[:, strip].flatten(0, 1) - before, v, blocks)
        moved += compose(before, v_change, blocks)
        change[:, strip] = moved.view_as(change[:, strip])
    return change.flatten(0, 1)


def trimmed_mean(values: Tensor, weights: Tensor, trim: float) -> Tensor:
    """Return the weighted mean over the last dimension without the lowest and the highest.

    Args:
        values: (…, n).
        weights: above 0, of a shape that broadcasts to that of the values.
        trim: β in [0, 1/2): ⌈βn⌉ values are left out at each end, but at most ⌊(n − 1)/2⌋.
    """
    count = values.shape[-1]
    cut = min(ceil(trim * count * (1 - 1e-7)), (count - 1) // 2)  # 100·0.07 is 7.000000000000001
    kept = values.argsort(dim=-1, stable=True)[..., cut : count - cut]
    weights = weights.expand_as(values).gather(-1, kept)
    return (values.gather(-1, kept) * weights).sum(-1) / weights.sum(-1)
