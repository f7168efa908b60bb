"""The base of all factorized layers: a weight R + U·Ω·Vᵀ with learnable factors, a frozen Ω and a frozen residual R.

Without a residual R is 0. With one, the layer is the dense layer W, of which only the n largest terms L are trained:
R = W − L is kept in few bits (`sharding.matrices.quantization`).

A weak client's layer can have a tail T besides: frozen terms that only stronger clients of the round train, stored in
few bits as well. Then the weight is R + T + U·Ω·Vᵀ, near to the server's, and it changes from round to round.
"""

from collections import OrderedDict
from math import prod
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sharding.errors import UserError, safe_repr
from sharding.layers.computed import ComputesWeight, computed
from sharding.layers.frozen import StoredMatrix
from sharding.matrices.activations import Moment, weighted_terms
from sharding.matrices.quantization import Format, check_format, empty_quantized, quantize
from sharding.matrices.spectrum import compose, largest_terms
from sharding.modules.wrappers import distribute_like, full_tensor, named_modules
from sharding.validation import is_whole

# Attributes that only the factorized layer has.
DERIVED = ("dense_type", "weight_shape", "num_blocks")
FACTORS = ("u", "v", "multipliers")
COMPUTED = (*FACTORS, "bias")  # plain attributes where pruning or normalization computes them
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
# The result of `layer.compile()`, and a bound `forward`, compute the old layer.
MACHINERY = frozenset(vars(nn.Module())) - {"training", *HOOKS} | {"_compiled_call_impl", "forward"}


class FactorizedLayer(ComputesWeight):
    """A layer whose matrix is the sum of n singular terms, ωᵢ·u'ᵢ v'ᵢᵀ, and a frozen residual R if it has one.

    A weight of any shape counts as a matrix of `weight.shape[0]` rows. The weight of a grouped convolution has a block
    for each group. Term i is then the i-th term of every block: the blocks of u' are stacked, and so are those of v'.

    Attributes:
        u: u', shape (rows, n), learnable; the rows are the layer's outputs, or its inputs if the weight is stored
            transposed (transposed convolutions, transformers' Conv1D).
        v: v', shape (columns, n), learnable.
        multipliers: ω, shape (n,), a buffer: saved and moved with the module, never trained.
        residual: R, a buffer in one of the formats of `sharding.matrices.quantization`, or None.
        tail: T, a buffer in one of these formats by its factors, a row for each term of each block, or None.
        bias: shape (out,), learnable, or None.
    """

    u: nn.Parameter
    v: nn.Parameter
    multipliers: Tensor
    residual: Tensor | None
    tail: Tensor | None
    bias: nn.Parameter | None
    adds_residual: ClassVar[bool] = False  # whether `forward` adds the products with R and T
    made_from: ClassVar[tuple[type[nn.Module], ...]] = (nn.Module,)  # the classes of the dense layer
    dense_type: type[nn.Module]  # what `to_dense` makes

    def __init__(self, dense: nn.Module, num_terms: int, residual_format: Format | None = None) -> None:
        """Take the geometry, attributes, hooks, mode and frozen parameters of a dense layer, without any values.

        `from_dense` fills them in.

        Args:
            dense: the dense layer; it can be on the `meta` device.
            num_terms: n.
            residual_format: the format of R; None for a layer without one.

        Raises:
            UserError: num_terms is not in 1…N, this kind of layer cannot be factorized, or its `forward` does not add a
                residual.
        """
        super().__init__()
        if not isinstance(dense, self.made_from):
            kinds = " or ".join(kind.__name__ for kind in self.made_from)
            raise UserError(f"{type(self).__name__} is made from an nn.{kinds}, not a {type(dense).__name__}")
        if residual_format is not None:
            check_format(residual_format, "residual_format")
        if residual_format is not None and not self.adds_residual:
            raise UserError(f"a {type(self).__name__} has no residual, since its adds_residual is not True")
        carry_over(dense, self)
        weight, bias = dense_weight(dense), dense._parameters.get("bias")
        self.dense_type = type(dense)
        self.weight_shape: tuple[int, ...] = tuple(weight.shape)
        self.num_blocks = num_blocks(dense)
        rows, columns = weight.shape[0], weight.shape[1:].numel()
        rank = min(rows // self.num_blocks, columns)
        if not (is_whole(num_terms) and 1 <= num_terms <= rank):
            raise UserError(
                f"num_terms is {safe_repr(num_terms)}, but a matrix of {rows // self.num_blocks}×{columns} has 1 to "
                f"{rank} terms"
            )
        num_terms = int(num_terms)

        def parameter(like: Tensor, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=weight.device, dtype=like.dtype), like.requires_grad)

        self.u = parameter(weight, rows, num_terms)
        self.v = parameter(weight, columns * self.num_blocks, num_terms)
        self.register_buffer("multipliers", torch.ones(num_terms, device=weight.device, dtype=weight.dtype))
        frozen = None if residual_format is None else empty_quantized(rows, columns, residual_format, weight.device)
        self.register_buffer("residual", frozen)
        self.register_buffer("tail", None)
        if "bias" in dense._parameters:  # an embedding has none, not even None
            self.register_parameter("bias", None if bias is None else parameter(bias, len(bias)))

    @property
    def num_terms(self) -> int:
        """The number of singular terms n."""
        return self.u.shape[1]

    @property
    def omega(self) -> Tensor:
        """ω in the type of the factors, which FSDP2's mixed precision casts without the buffers, shape (n,)."""
        return distribute_like(self.multipliers.to(self.u.dtype), self.u, copies=True)

    @property
    def scaled_u(self) -> Tensor:
        """UΩ, shape (rows, n)."""
        return self.u * self.omega

    @property
    def columns(self) -> int:
        """The columns of the matrix, or of each of its blocks."""
        return prod(self.weight_shape[1:])

    @property
    def frozen(self) -> list[StoredMatrix]:
        """R, stored whole, and T, stored by its factors: those that the layer has."""
        parts = ((self.residual, False), (self.tail, True))
        return [self._stored_matrix(stored, by_terms) for stored, by_terms in parts if stored is not None]

    def can_add(self, stored: Tensor, by_terms: bool) -> bool:
        """Whether this stored tensor can be the layer's residual, or its tail, which is stored by its terms."""
        return self.adds_residual and self._stored_matrix(stored, by_terms).is_valid

    def _stored_matrix(self, stored: Tensor, by_terms: bool) -> StoredMatrix:
        rows = self.weight_shape[0] // self.num_blocks
        return StoredMatrix(stored, rows, self.columns, self.num_blocks, by_terms)

    def dequantize_tail(self) -> None:
        """Keep the tail in the type of the factors from now on: it takes more memory, and no step dequantizes it."""
        if self.tail is not None:
            self.tail = torch.cat(self._stored_matrix(self.tail, by_terms=True).factors(self.u.dtype), dim=1)

    def matrix(self) -> Tensor:
        """Return R + T + UΩVᵀ, shape (rows, columns of a block)."""
        return self._compose(self.u, self.omega, self.v).flatten(1)

    @property
    def weight(self) -> Tensor:
        """The weight R + T + UΩVᵀ in the dense layer's shape, for code that reads `layer.weight`.

        It is computed where its values are used, so that its shape, dtype and device cost nothing. A write to it is a
        `UserError`: write to `u` and `v`, or merge the model first.
        """
        return computed(self.weight_shape, self._compose, self.u, self.omega, self.v)

    def _compose(self, u: Tensor, omega: Tensor, v: Tensor) -> Tensor:
        matrix = compose(u * omega, v, self.num_blocks)
        for part in self.frozen:
            matrix = matrix + distribute_like(part.dense(matrix.dtype), matrix, copies=True)
        return matrix.view(self.weight_shape)

    @classmethod
    def from_dense(
        cls, layer: nn.Module, num_terms: int, residual_format: Format | None = None, moment: Moment | None = None
    ) -> Self:
        """Return a copy of `layer` with its `num_terms` largest singular terms and ω = 1.

        With num_terms = N (the rank) it computes the same function as `layer`, unless the layer's class has a `forward`
        of its own or an embedding renormalizes, which `factorize` refuses. On the `meta` device it has no values.

        Args:
            layer: the dense layer.
            num_terms: n.
            residual_format: the format that keeps the other terms, frozen; None to drop them.
            moment: the moment of the layer's activations, if it chooses the terms; see `sharding.matrices.activations`.

        Raises:
            UserError: as the constructor.
        """
        factorized = cls(layer, num_terms, residual_format)
        if factorized.u.is_meta:
            return factorized
        blocks = matrices_of(layer)
        u, v = largest_terms(blocks, num_terms) if moment is None else weighted_terms(blocks, num_terms, moment)
        with torch.no_grad():
            factorized.u.copy_(u)
            factorized.v.copy_(v)
            factorized._clear(layer)
            if residual_format is not None and factorized.residual is not None:
                terms = compose(factorized.u.double(), factorized.v.double(), factorized.num_blocks)
                factorized.residual.copy_(quantize(blocks.flatten(0, 1).double() - terms, residual_format))
            if (bias := factorized._parameters.get("bias")) is not None:
                bias.copy_(layer.get_parameter("bias"))
        return factorized

    @torch.no_grad()
    def to_dense(self) -> nn.Module:
        """Return the ordinary layer, its weight composed in float64 so that half precision does not drift.

        Factors that are computed (pruned, normalized or parametrized) enter with their values.

        Raises:
            UserError: a weight was put into `_parameters` or `vars` of this layer.
        """
        self.refuse_written_weight()
        dense = self.dense_type.__new__(self.dense_type)  # a subclass can have any `__init__`
        nn.Module.__init__(dense)
        carry_over(self, dense)
        self.compute_factors()
        hooks = ((number, hook) for number, hook in self._forward_pre_hooks.items() if not _computes_factor(hook))
        dense._forward_pre_hooks = OrderedDict(hooks)
        omega = self.multipliers.to(self.u.device, torch.float64)  # buffers can have values where parameters have none
        weight = compose(self.u.double() * omega, self.v.double(), self.num_blocks)
        for part in self.frozen:
            weight += part.dense(torch.float64).to(weight.device)
        trains = any(part.requires_grad for name, part in self.named_parameters() if "bias" not in name)
        dense.weight = nn.Parameter(weight.view(self.weight_shape).to(self.u.dtype), trains)
        if hasattr(self, "bias"):  # an embedding has none, not even None
            bias = self.bias
            dense.register_parameter("bias", None if bias is None else nn.Parameter(bias.clone(), bias.requires_grad))
        return dense

    def compute_factors(self) -> None:
        """Let the hooks that compute a factor or bias, as those of pruning do, give it the value of the next call."""
        for hook in self._forward_pre_hooks.values():
            if _computes_factor(hook):
                hook(self, ())

    def _clear(self, layer: nn.Module) -> None:
        """Set to zero, in place, what a dense layer of this kind keeps at zero."""


def _computes_factor(hook: object) -> bool:
    """Whether a hook is one of torch's pruning or normalization that computes a factor or a bias."""
    return getattr(hook, "_tensor_name", getattr(hook, "name", None)) in COMPUTED


def as_blocks(weight: Tensor, blocks: int) -> Tensor:
    """Return a dense layer's weight as matrices, shape (blocks, rows, columns)."""
    return weight.flatten(1).unflatten(0, (blocks, -1))


def num_blocks(layer: nn.Module) -> int:
    """Return the number of blocks of a dense layer's matrix: a convolution's groups, else 1."""
    return layer.groups if isinstance(layer, _ConvNd) else 1


def matrices_of(layer: nn.Module) -> Tensor:
    """Return a dense layer's weight, detached and gathered, as matrices, shape (blocks, rows, columns)."""
    return as_blocks(full_tensor(dense_weight(layer)).detach(), num_blocks(layer))


def dense_weight(layer: nn.Module) -> Tensor:
    """Return a dense layer's weight."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight


def carry_over(source: nn.Module, target: nn.Module) -> None:
    """Copy attributes, hooks and the mode of a layer to its replacement, but none of this library's notes."""
    vars(target).update(
        (name, value)
        for name, value in vars(source).items()
        if name not in MACHINERY and name not in DERIVED and not (name in COMPUTED and isinstance(value, Tensor))
    )


def factorized_layers(model: nn.Module) -> dict[str, FactorizedLayer]:
    """Return the factorized layers of a model, by name."""
    return {name: part for name, part in named_modules(model) if isinstance(part, FactorizedLayer)}


def residual_layers(model: nn.Module) -> dict[str, Tensor]:
    """Return R of the factorized layers that have one, by name."""
    layers = factorized_layers(model)
    return {name: layer.residual for name, layer in layers.items() if layer.residual is not None}
