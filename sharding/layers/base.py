"""The base of all factorized layers: a weight U·Ω·Vᵀ with learnable factors and a frozen diagonal Ω."""

from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sharding.errors import UserError
from sharding.layers.computed import computed
from sharding.svd.spectrum import compose
from sharding.svd.truncation import largest_terms

# A factorized layer's notes on its dense layer, which the dense layer does not have.
OWN = ("dense_type", "weight_shape", "num_blocks", "axis")
# Hooks that users register on a layer; its replacement takes them over.
HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
# The result of `layer.compile()` computes the old layer.
MACHINERY = frozenset(vars(nn.Module())) - {"training", *HOOKS} | {"_compiled_call_impl"}


class FactorizedLayer(nn.Module):
    """A layer whose matrix is the sum of n singular terms, ωᵢ·u'ᵢ v'ᵢᵀ.

    A weight of any shape counts as a matrix of `weight.shape[0]` rows. The weight of a grouped convolution has a block
    for each group. Term i is then the i-th term of every block: the blocks of u' are stacked, and so are those of v'.

    Attributes:
        u: u', shape (rows, n), learnable; the rows are the layer's outputs, or its inputs if the weight is stored
            transposed (transposed convolutions, transformers' Conv1D).
        v: v', shape (columns, n), learnable.
        multipliers: ω, shape (n,), a buffer: saved and moved with the module, never trained.
        bias: shape (out,), learnable, or None.
    """

    u: nn.Parameter
    v: nn.Parameter
    multipliers: Tensor
    bias: nn.Parameter | None
    made_from: ClassVar[tuple[type[nn.Module], ...]] = (nn.Module,)  # the classes of the dense layer
    dense_type: type[nn.Module]  # what `to_dense` makes

    def __init__(self, dense: nn.Module, num_terms: int) -> None:
        """Take the geometry, attributes, hooks, mode and frozen parameters of a dense layer, without any values.

        `from_dense` fills them in.

        Args:
            dense: the dense layer; it can be on the `meta` device.
            num_terms: n.

        Raises:
            UserError: num_terms is not in 1…N, or this kind of layer cannot be factorized.
        """
        super().__init__()
        if not isinstance(dense, self.made_from):
            kinds = " or ".join(kind.__name__ for kind in self.made_from)
            raise UserError(f"{type(self).__name__} is made from an nn.{kinds}, not a {type(dense).__name__}")
        carry_over(dense, self)
        weight, bias = _weight(dense), dense._parameters.get("bias")
        self.dense_type = type(dense)
        self.weight_shape: tuple[int, ...] = tuple(weight.shape)
        self.num_blocks = num_blocks(dense)
        rows, columns = weight.shape[0], weight.shape[1:].numel()
        rank = min(rows // self.num_blocks, columns)
        if not 1 <= num_terms <= rank:
            raise UserError(
                f"num_terms is {num_terms}, but a matrix of {rows // self.num_blocks}×{columns} has 1 to {rank} terms"
            )

        def parameter(like: Tensor, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=weight.device, dtype=like.dtype), like.requires_grad)

        self.u = parameter(weight, rows, num_terms)
        self.v = parameter(weight, columns * self.num_blocks, num_terms)
        self.register_buffer("multipliers", torch.ones(num_terms, device=weight.device, dtype=weight.dtype))
        if "bias" in dense._parameters:  # an embedding has none, not even None
            self.register_parameter("bias", None if bias is None else parameter(bias, len(bias)))

    @property
    def num_terms(self) -> int:
        """The number of singular terms n."""
        return self.u.shape[1]

    @property
    def omega(self) -> Tensor:
        """ω in the type of the factors, which FSDP2's mixed precision casts without the buffers, shape (n,)."""
        return self.multipliers.to(self.u.dtype)

    @property
    def scaled_u(self) -> Tensor:
        """UΩ, shape (rows, n)."""
        return self.u * self.omega

    def matrix(self) -> Tensor:
        """Return UΩVᵀ, shape (rows, columns of a block)."""
        return compose(self.scaled_u, self.v, self.num_blocks)

    @property
    def weight(self) -> Tensor:
        """The weight UΩVᵀ in the dense layer's shape, for code that reads `layer.weight`.

        It is computed where its values are used, so that its shape, dtype and device cost nothing. A write to it is a
        `UserError`: write to `u` and `v`, or merge the model first.
        """
        return computed(self.weight_shape, self._compose, self.u, self.omega, self.v)

    def _compose(self, u: Tensor, omega: Tensor, v: Tensor) -> Tensor:
        return compose(u * omega, v, self.num_blocks).view(self.weight_shape)

    @classmethod
    def from_dense(cls, layer: nn.Module, num_terms: int) -> Self:
        """Return a copy of `layer` with its `num_terms` largest singular terms and ω = 1.

        With num_terms = N (the rank) it computes the same function as `layer`, unless the layer's class has a `forward`
        of its own or an embedding renormalizes, which `factorize` refuses. On the `meta` device it has no values.

        Raises:
            UserError: num_terms is not in 1…N, or this kind of layer cannot be factorized.
        """
        factorized = cls(layer, num_terms)
        if factorized.u.is_meta:
            return factorized
        u, v = largest_terms(as_blocks(_weight(layer).detach(), factorized.num_blocks), num_terms)
        with torch.no_grad():
            factorized.u.copy_(u)
            factorized.v.copy_(v)
            if (bias := factorized._parameters.get("bias")) is not None:
                bias.copy_(layer.get_parameter("bias"))
        return factorized

    @torch.no_grad()
    def to_dense(self) -> nn.Module:
        """Return the ordinary layer with weight UΩVᵀ, composed in float64 so that half precision does not drift."""
        dense = self.dense_type.__new__(self.dense_type)  # a subclass can have any `__init__`
        nn.Module.__init__(dense)
        carry_over(self, dense)
        weight = compose(self.u.double() * self.multipliers.double(), self.v.double(), self.num_blocks)
        trains = self.u.requires_grad or self.v.requires_grad
        dense.weight = nn.Parameter(weight.view(self.weight_shape).to(self.u.dtype), trains)
        if "bias" in self._parameters:
            bias = self.bias
            dense.register_parameter("bias", None if bias is None else nn.Parameter(bias.clone(), bias.requires_grad))
        return dense


def as_blocks(weight: Tensor, blocks: int) -> Tensor:
    """Return a dense layer's weight as matrices, shape (blocks, rows, columns)."""
    return weight.flatten(1).unflatten(0, (blocks, -1))


def num_blocks(layer: nn.Module) -> int:
    """Return the number of blocks of a dense layer's matrix: a convolution's groups, else 1."""
    return layer.groups if isinstance(layer, _ConvNd) else 1


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def carry_over(source: nn.Module, target: nn.Module) -> None:
    """Copy attributes, hooks and the mode of a layer to its replacement."""
    vars(target).update(plain_attributes(source))


def plain_attributes(layer: nn.Module) -> dict[str, object]:
    """Return a layer's attributes other than parameters, buffers, modules and this library's notes."""
    return {name: value for name, value in vars(layer).items() if name not in MACHINERY and name not in OWN}
