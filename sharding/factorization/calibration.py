"""Observe a model's activations, to truncate its weights by them."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from sharding.errors import UserError, safe_repr
from sharding.layers import num_blocks
from sharding.layers.linear import is_transposed_linear
from sharding.matrices.activations import Moment

Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]


@torch.no_grad()
def observe(model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Batch]) -> dict[str, Moment]:
    """Run batches through a model in evaluation mode, and return the second moments of each layer's activations.

    A layer takes memory for the square of its outputs, or of its inputs where a linear layer has fewer, in float64.

    Args:
        model: the model. It is unchanged afterwards.
        layers: parts of the model, by name.
        batches: the model's inputs; or pairs (inputs, targets), of which the targets are ignored; or dicts of
            keyword arguments.

    Raises:
        UserError: there are no batches, a layer of this kind has no such moments, or its activations are not finite.
    """
    if isinstance(batches, Mapping):
        raise UserError("calibration is one dict; pass a list of such, each the keyword arguments of one batch")
    moments = {name: _empty_moment(name, layer) for name, layer in layers.items()}
    modes = [(module, module.training) for module in model.modules()]
    hooks = [
        layer.register_forward_hook(partial(_add, moments[name]), with_kwargs=True) for name, layer in layers.items()
    ]
    count = 0
    try:
        model.eval()
        for batch in batches:
            count += 1
            if not isinstance(batch, Tensor | tuple | list | Mapping):
                raise UserError(f"calibration has {safe_repr(batch)}; pass inputs of the model, or dicts of them")
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                model(batch[0] if isinstance(batch, tuple | list) else batch)
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes:
            module.training = mode
    if not count:
        raise UserError(f"calibration is {safe_repr(batches)}, which has no batches; pass some inputs of the model")
    for name, moment in moments.items():
        if not moment.sums.isfinite().all():
            side = "inputs" if moment.of_inputs else "outputs"
            raise UserError(
                f"the {side} of layer {name} had NaN or Inf in calibration; remove such batches, or calibrate in "
                "float32 if float16 overflows"
            )
    return moments


def _empty_moment(name: str, layer: nn.Module) -> Moment:
    """Return the moments of a layer before any activations."""
    weight, blocks = layer.get_parameter("weight"), num_blocks(layer)
    transposed = isinstance(layer, _ConvTransposeNd | nn.Embedding) or is_transposed_linear(layer)
    rows, columns = weight.shape[0], weight.shape[1:].numel()
    inputs, outputs = (rows, columns) if transposed else (columns, rows)
    if isinstance(layer, _ConvNd):  # a transposed one's outputs overlap, and an ordinary one's inputs
        of_inputs = isinstance(layer, _ConvTransposeNd)
    elif isinstance(layer, nn.Linear) or is_transposed_linear(layer):
        of_inputs = inputs < outputs
    elif isinstance(layer, nn.Embedding):
        of_inputs = False
    else:
        raise UserError(
            f"calibration cannot observe {name}, a {type(layer).__name__}; leave it out with skip, or do not calibrate"
        )
    width = (inputs if of_inputs else outputs) // blocks
    return Moment(weight.new_zeros(blocks, width, width, dtype=torch.float64), of_inputs, transposed)


def _add(
    moment: Moment, layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor], output: Tensor
) -> None:
    """Add what a layer computed; a forward hook with keyword arguments."""
    activations = (*inputs, *named.values())[0] if moment.of_inputs else output
    if isinstance(layer, _ConvNd):
        activations = activations.movedim(-len(layer.kernel_size) - 1, -1)
    bias = layer._parameters.get("bias")
    moment.add(activations if moment.of_inputs or bias is None else activations - bias)
