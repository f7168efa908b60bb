"""Decompose sharded layers: the weight W of a dense layer, or the product L = UVᵀ of a factorized one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sharding.errors import UserError
from sharding.layers import FactorizedLayer, num_blocks, padding_row
from sharding.layers.base import dense_weight, matrices_of
from sharding.matrices.product import decompose_product
from sharding.matrices.spectrum import Choose, Spectrum, check_matrices, decompose_batch, map_batches
from sharding.matrices.values import first_flagged
from sharding.modules.memory import release_freed_memory
from sharding.modules.wrappers import full_tensor


class Form(NamedTuple):
    """The form of a layer's matrix.

    Attributes:
        blocks: the number of blocks of the matrix; a grouped convolution has one for each group.
        rows: the number of rows of a block.
        columns: the number of columns of a block.
        num_terms: the number of terms of the layer: N = min(rows, columns), or those of its factors.
        dtype: the dtype of the matrix's numbers.
    """

    blocks: int
    rows: int
    columns: int
    num_terms: int
    dtype: torch.dtype

    @property
    def rank(self) -> int:
        """N = min(rows, columns)."""
        return min(self.rows, self.columns)


def form_of(layer: nn.Module) -> Form:
    """Return the form of a dense or factorized layer's matrix."""
    if isinstance(layer, FactorizedLayer):
        blocks = layer.num_blocks
        return Form(blocks, len(layer.u) // blocks, layer.columns, layer.num_terms, layer.u.dtype)
    weight, blocks = dense_weight(layer), num_blocks(layer)
    rows, columns = weight.shape[0] // blocks, weight.shape[1:].numel()
    return Form(blocks, rows, columns, min(rows, columns), weight.dtype)


def check_layers(layers: Mapping[str, nn.Module]) -> None:
    """Raise a UserError if a weight has NaN or Inf, or a factorized layer has a client's multipliers, other than 1."""
    check_matrices(_named_matrices(layers))
    factorized = {name: layer for name, layer in layers.items() if isinstance(layer, FactorizedLayer)}
    scaled = [(name, (layer.multipliers != 1).any()) for name, layer in factorized.items()]
    if (name := first_flagged(scaled)) is not None:
        raise UserError(
            f"layer {name} has multipliers other than 1, as a client's; the server's model comes from factorize"
        )


def _named_matrices(layers: Mapping[str, nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the matrix of every dense layer and both factors of every other, whole, one at a time."""
    for name, layer in layers.items():
        if isinstance(layer, FactorizedLayer):
            yield name, full_tensor(layer.u)
            yield name, full_tensor(layer.v)
        else:
            yield name, matrices_of(layer)


def decompose_layers(layers: Mapping[str, nn.Module], choose: Callable[[str, Tensor], Tensor]) -> dict[str, Spectrum]:
    """Decompose every layer, and return the spectra with the terms that a function of name and magnitudes chooses.

    All vectors of all layers together would take more memory than the model. Layers are decomposed side by side on a
    CPU, so that the function is called by several threads.

    Raises:
        UserError: as `check_layers`, where a decomposition fails.
    """

    def of_batch(names: list[str]) -> Sequence[Spectrum]:
        try:
            spectra = _decompose([layers[name] for name in names], [partial(choose, name) for name in names])
        except RuntimeError:
            check_layers({name: layers[name] for name in names})  # names what has become NaN since it was checked
            raise
        release_freed_memory()
        return spectra

    matrices = {
        name: layer.u if isinstance(layer, FactorizedLayer) else matrices_of(layer) for name, layer in layers.items()
    }
    return map_batches(of_batch, matrices)


def _decompose(layers: Sequence[nn.Module], choices: Sequence[Choose]) -> Sequence[Spectrum]:
    """Decompose layers of one kind, shape, dtype and device; dense ones in one batched call."""
    products = []
    for layer, choose in zip(layers, choices, strict=True):
        if isinstance(layer, FactorizedLayer):
            a, b = (full_tensor(side).unflatten(0, (layer.num_blocks, -1)) for side in (layer.u, layer.v))
            products.append(decompose_product(a, b, choose))
    if products:
        return products
    spectra = decompose_batch([matrices_of(layer) for layer in layers], choices)
    for layer, spectrum in zip(layers, spectra, strict=True):
        if isinstance(layer, nn.Embedding) and (row := padding_row(layer)) is not None:
            spectrum.u[row] = 0  # a term of magnitude zero can have any u'
    return spectra
