"""Decompose sharded layers: the weight W of a dense layer, or the product L = UVᵀ of a factorized one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from sharding.errors import UserError
from sharding.layers import FactorizedLayer, as_blocks, num_blocks, padding_row
from sharding.matrices.product import ProductDecomposition, decompose_product
from sharding.matrices.spectrum import Decomposition, check_matrices, decompose_batch, group_by_shape, map_threads
from sharding.matrices.values import first_flagged
from sharding.modules.memory import release_freed_memory
from sharding.modules.wrappers import full_tensor

Result = TypeVar("Result")


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
    weight, blocks = _weight(layer), num_blocks(layer)
    rows, columns = weight.shape[0] // blocks, weight.shape[1:].numel()
    return Form(blocks, rows, columns, min(rows, columns), weight.dtype)


def check_layers(layers: Mapping[str, nn.Module]) -> None:
    """Check that layers have singular terms to share.

    Raises:
        UserError: a weight or factor has NaN or Inf, or a factorized layer has multipliers other than 1, as that of a
            client.
    """
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
            yield name, _blocks(layer)


def decompose_layers(
    layers: Mapping[str, nn.Module], function: Callable[[str, Decomposition | ProductDecomposition], Result]
) -> dict[str, Result]:
    """Decompose every layer, and return what a function of its name and its decomposition returns, by name.

    A decomposition is forgotten at once: all of them together take more memory than the model. Side by side on a CPU.

    Raises:
        UserError: as `check_layers`, where a decomposition fails.
    """

    def of_batch(names: list[str]) -> list[Result]:
        try:
            decompositions = _decompose([layers[name] for name in names])
        except RuntimeError:
            check_layers({name: layers[name] for name in names})  # names what has become NaN since it was checked
            raise
        results = [function(*each) for each in zip(names, decompositions, strict=True)]
        del decompositions
        release_freed_memory()
        return results

    batches = group_by_shape(
        {name: layer.u if isinstance(layer, FactorizedLayer) else _blocks(layer) for name, layer in layers.items()}
    )
    devices = {part.device for layer in layers.values() for part in layer.parameters()}
    results = {
        name: result
        for names, of_names in zip(batches, map_threads(of_batch, batches, devices), strict=True)
        for name, result in zip(names, of_names, strict=True)
    }
    return {name: results[name] for name in layers}


def _decompose(layers: Sequence[nn.Module]) -> Sequence[Decomposition | ProductDecomposition]:
    """Decompose layers of one kind, shape, dtype and device; dense ones in one batched call."""
    factorized = [layer for layer in layers if isinstance(layer, FactorizedLayer)]
    if not factorized:
        decompositions = decompose_batch([_blocks(layer) for layer in layers])
        for layer, decomposition in zip(layers, decompositions, strict=True):
            if isinstance(layer, nn.Embedding):
                _clear_padding(layer, decomposition)
        return decompositions
    return [
        decompose_product(*(full_tensor(side).unflatten(0, (layer.num_blocks, -1)) for side in (layer.u, layer.v)))
        for layer in factorized
    ]


def _clear_padding(layer: nn.Module, decomposition: Decomposition) -> None:
    """Keep a zero padding row zero in every term, in place: a term of magnitude zero can have any u'."""
    outputs = decomposition.left if decomposition.wide else decomposition.right  # where None, they are Wᵀu/λ: zero
    if outputs is not None and (row := padding_row(layer)) is not None:
        outputs[..., row] = 0


def _blocks(layer: nn.Module) -> Tensor:
    return as_blocks(full_tensor(_weight(layer)).detach(), num_blocks(layer))


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight
