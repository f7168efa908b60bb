"""A linear layer whose outputs are split into separate layers.

Many models compute q, k and v in one layer. As one matrix the three share their right singular vectors. After the split
each has its own spectrum.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sharding.errors import UserError, safe_repr
from sharding.layers.base import HOOKS, carry_over, plain_attributes
from sharding.layers.computed import ComputesWeight, computed
from sharding.layers.linear import is_transposed_linear
from sharding.validation import is_whole


class SplitLinear(ComputesWeight):
    """A drop-in for a fused `nn.Linear` (or transformers' `Conv1D`), with its parts as modules `parts.0`, `parts.1`, …

    `to_fused` undoes it when the parts are ordinary layers.

    Args:
        layer: the fused layer.
        parts: the number of equal parts, or the sizes of the parts.

    Raises:
        UserError: the layer is not linear, or its outputs cannot be split like this.
    """

    def __init__(self, layer: nn.Module, parts: int | Sequence[int]) -> None:
        super().__init__()
        if not (type(layer) is nn.Linear or is_transposed_linear(layer)):
            raise UserError(f"a {type(layer).__name__} cannot be split; only nn.Linear and transformers' Conv1D can")
        for name in ("weight", "bias"):
            if layer._parameters.get(name) is None and getattr(layer, name) is not None:
                raise UserError(f"a layer whose {name} is computed (normalized or pruned) cannot be split")
        carry_over(layer, self)
        self.axis = int(is_transposed_linear(layer))  # of the weight, the one that counts the outputs
        weight = _parameter(layer, "weight")
        sizes = _sizes(weight.shape[self.axis], parts)
        weights = weight.split(sizes, dim=self.axis)
        biases = [None] * len(sizes) if layer.bias is None else _parameter(layer, "bias").split(sizes)
        pairs = zip(weights, biases, strict=True)
        self.parts = nn.ModuleList([_like(layer, self.axis, *pair) for pair in pairs])

    def to_fused(self) -> nn.Module:
        """Return the fused layer; a parameter is trainable if it is in any part.

        Raises:
            UserError: a weight was put into `_parameters` or `vars` of this layer.
        """
        self.refuse_written_weight()
        fused = _like(self.parts[0], self.axis, self.weight, self.bias)
        carry_over(self, fused)
        for name, parameter in fused.named_parameters(recurse=False):
            parameter.requires_grad_(any(_parameter(part, name).requires_grad for part in self.parts))
        return fused

    def forward(self, input: Tensor) -> Tensor:
        """Map (..., in) to (..., out)."""
        return torch.cat([part(input) for part in self.parts], dim=-1)

    @property
    def sizes(self) -> list[int]:
        """The number of outputs of each part."""
        return [_parameter(part, "weight").shape[self.axis] for part in self.parts]

    @property
    def weight(self) -> Tensor:
        """The weights of all parts concatenated, for code that reads `layer.weight`; see `FactorizedLayer.weight`."""
        return self._joined("weight", self.axis)

    @property
    def bias(self) -> Tensor | None:
        """The biases of all parts concatenated."""
        return None if self.parts[0].bias is None else self._joined("bias", 0)

    def _joined(self, name: str, axis: int) -> Tensor:
        tensors = [_parameter(part, name) for part in self.parts]
        shape = list(tensors[0].shape)
        shape[axis] = sum(tensor.shape[axis] for tensor in tensors)
        return computed(shape, lambda *each: torch.cat(each, dim=axis), *tensors)


def _sizes(out: int, parts: int | Sequence[int]) -> list[int]:
    """Return the outputs of each part."""
    if isinstance(parts, Sequence):
        sizes = list(parts)
        if not all(is_whole(size) and size > 0 for size in sizes):
            raise UserError(f"the sizes {safe_repr(sizes)} are of parts of {out} outputs; whole numbers are needed")
        if sum(sizes) != out:
            raise UserError(f"the sizes {sizes} of the parts sum to {sum(sizes)}, not to the {out} outputs")
        return list(map(int, sizes))
    if is_whole(parts) and parts > 0 and out % parts == 0:
        return [out // int(parts)] * int(parts)
    raise UserError(f"{out} outputs cannot be split in {safe_repr(parts)} equal parts; give their sizes")


def _parameter(layer: nn.Module, name: str) -> Tensor:
    parameter = getattr(layer, name)
    assert isinstance(parameter, Tensor)
    return parameter


def _like(layer: nn.Module, axis: int, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """Return a layer with these values and the attributes of another layer, but without its hooks."""
    made = type(layer).__new__(type(layer))
    nn.Module.__init__(made)
    vars(made).update({name: value for name, value in plain_attributes(layer).items() if name not in HOOKS})
    setattr(made, "nf" if hasattr(layer, "nf") else "out_features", weight.shape[axis])
    made.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    made.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone(), bias.requires_grad))
    return made
