"""The weighted mean of a round's updates, vector by vector, summed as they arrive."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from sharding.matrices.spectrum import Spectrum
from sharding.rounds.shard import Update

PIECE = 2**15  # numbers


class RunningMean:
    """Sums in float64, so that memory does not grow with the cohort. Updates must be on the device of the spectra.

    Attributes:
        weight: the weight of all updates so far.
    """

    def __init__(self, spectra: Mapping[str, Spectrum]) -> None:
        self.weight = 0.0
        self._spectra = spectra
        self._whole: dict[str, Tensor] = {}
        self._layers: dict[str, _Sums] = {}

    def add(self, update: Update, weight: float, in_tail: Mapping[str, Tensor]) -> None:
        """Add an update of values, and by layer the indices of the terms that its client holds as they were sent."""
        self.weight += weight
        for name, tensor in update.whole.items():
            if name in self._whole:
                _add(self._whole[name], tensor, weight)
            else:
                self._whole[name] = tensor.double().contiguous() * weight
        for name, terms in update.terms.items():
            if name not in self._layers:
                self._layers[name] = _Sums(self._spectra[name])
            self._layers[name].add(terms.indices, terms.u, terms.v, weight)
            if name in in_tail:
                self._layers[name].hold(in_tail[name], weight)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the mean of every tensor that is sent whole times `weight`, float64, and forget the sums."""
        for name in list(self._whole):
            yield name, self._whole.pop(name)

    def vectors(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the means ū and v̄ of every sharded layer's kept terms, in the form of its spectrum, float64, once.

        Each vector is averaged over the clients that hold it; a vector that nobody trains is the spectrum's own.
        """
        for name in list(self._layers):
            yield name, *self._layers.pop(name).means()


def _add(total: Tensor, part: Tensor, weight: float) -> None:
    """Add weight·part to a total in float64; on a CPU in pieces whose conversions stay in its cache."""
    size = PIECE if part.device.type == "cpu" else max(1, part.numel())
    for sums, piece in zip(total.view(-1).split(size), part.reshape(-1).split(size), strict=True):
        sums.add_(piece.double(), alpha=weight)  # float8 is not promoted


class _Sums:
    """Running sums of one layer's vectors, and of the weights behind each."""

    def __init__(self, spectrum: Spectrum) -> None:
        self._kept = spectrum
        self._u = torch.zeros_like(spectrum.u, dtype=torch.float64)
        self._v = torch.zeros_like(spectrum.v, dtype=torch.float64)
        self._weights = torch.zeros(spectrum.u.shape[1], dtype=torch.float64, device=spectrum.u.device)
        self._unchanged = torch.zeros_like(self._weights)  # of the clients that hold each term as it was sent

    def add(self, indices: Tensor, u: Tensor, v: Tensor, weight: float) -> None:
        columns = self._kept.columns(indices)
        self._weights[columns] += weight
        for sums, part in ((self._u, u), (self._v, v)):
            sums.index_add_(1, columns, part.double() * weight)

    def hold(self, indices: Tensor, weight: float) -> None:
        self._unchanged[self._kept.columns(indices)] += weight

    def means(self) -> tuple[Tensor, Tensor]:
        """Return ū and v̄ in the memory of the sums."""
        trained, mixed = self._weights > 0, (self._weights > 0) & (self._unchanged > 0)
        total = self._weights + self._unchanged
        for sums, kept in ((self._u, self._kept.u), (self._v, self._kept.v)):
            sums[:, mixed] += kept[:, mixed].double() * self._unchanged[mixed]
            sums.div_(total.where(trained, total.new_ones(())))
            sums[:, ~trained] = kept[:, ~trained].double()
        return self._u, self._v
