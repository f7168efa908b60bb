"""The models of G clients as one: their parameters on a client axis, their batches folded into one batch.

In a network only what has parameters differs from client to client. Each such layer is replaced by one that holds the
parameters of all clients, shape (G, …), and reads a batch (G·B, …) whose rows g·B … (g+1)·B − 1 are client g's. Linear
layers become batched matrix products, convolutions see `convolution`, norms are one call with an affine part per
client. Activations, pooling, attention and the like treat every sample by itself and stay as they are.
"""

from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.layers import FactorizedConv2d, FactorizedLinear
from train.dropout import name_of
from train.engines.choices import Choices
from train.engines.convolution import Geometry, affine, convolve, pointwise


class NotFoldableError(Exception):
    """A model has a part that cannot be folded; its clients are trained one by one."""


class Folded(nn.Module):
    """A layer of G clients.

    Args:
        layer: of one client; its parameters and buffers, each repeated along a new first axis, become this module's.
        num_clients: G.
        choices: of the ways to compute it in.
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(self, layer: nn.Module, num_clients: int, choices: Choices) -> None:
        super().__init__()
        self.num_clients, self.choices = num_clients, choices
        if "bias" not in layer._parameters:
            self.register_parameter("bias", None)
        for name, parameter in layer._parameters.items():
            self.register_parameter(name, None if parameter is None else _repeat(parameter, num_clients))
        for name, buffer in layer._buffers.items():
            self.register_buffer(name, None if buffer is None else buffer.expand(num_clients, *buffer.shape).clone())

    def per_sample(self, parameter: Tensor, x: Tensor) -> Tensor:
        """Return a parameter (G, …) once for every sample of a batch x (G·B, …)."""
        return parameter.repeat_interleave(len(x) // self.num_clients, dim=0)


class FoldedLinear(Folded):
    """`nn.Linear` of each client: (G·B, …, in) -> (G·B, …, out)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map a folded batch."""
        assert self.weight is not None
        return affine(x, self.weight.mT, self.bias)


class FoldedFactorizedLinear(Folded):
    """`FactorizedLinear` of each client: (G·B, …, in) -> (G·B, …, out)."""

    u: Tensor
    v: Tensor
    multipliers: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Map a folded batch."""
        return affine(affine(x, self.v, None), (self.u * self.multipliers[:, None]).mT, self.bias)


class FoldedConv2d(Folded):
    """`nn.Conv2d` of each client: (G·B, in, H, W) -> (G·B, out, H', W')."""

    def __init__(self, layer: nn.Conv2d, num_clients: int, choices: Choices) -> None:
        if layer.groups != 1:
            raise NotFoldableError("a grouped convolution")
        super().__init__(layer, num_clients, choices)
        self.geometry = _geometry(layer)

    def forward(self, x: Tensor) -> Tensor:
        """Map a folded batch."""
        assert self.weight is not None
        y = convolve(x, self.weight, self.geometry, self.choices)
        return y if self.bias is None else y + self.per_sample(self.bias, x)[:, :, None, None]


class FoldedFactorizedConv2d(Folded):
    """`FactorizedConv2d` of each client: k×k convolutions to n channels, then 1×1 ones as matrix products."""

    u: Tensor
    v: Tensor
    multipliers: Tensor

    def __init__(self, layer: FactorizedConv2d, num_clients: int, choices: Choices) -> None:
        if layer.groups != 1:
            raise NotFoldableError("a grouped convolution")
        super().__init__(layer, num_clients, choices)
        self.geometry = _geometry(layer)
        self.filter_shape = (layer.in_channels, *layer.kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        """Map a folded batch."""
        terms = convolve(x, self.v.mT.unflatten(2, self.filter_shape), self.geometry, self.choices)
        return pointwise(terms, self.u * self.multipliers[:, None], self.bias)


class FoldedGroupNorm(Folded):
    """`nn.GroupNorm` of each client: every sample is normalized by itself, then scaled as its client has it."""

    def __init__(self, layer: nn.GroupNorm, num_clients: int, choices: Choices) -> None:
        super().__init__(layer, num_clients, choices)
        self.normalize = partial(F.group_norm, num_groups=layer.num_groups, eps=layer.eps)

    def forward(self, x: Tensor) -> Tensor:
        """Map a folded batch (G·B, channels, …)."""
        y = self.normalize(x)
        if self.weight is None or self.bias is None:
            return y
        shape = (*x.shape[:2], *[1] * (x.dim() - 2))
        return torch.addcmul(self.per_sample(self.bias, x).view(shape), y, self.per_sample(self.weight, x).view(shape))


class FoldedLayerNorm(Folded):
    """`nn.LayerNorm` of each client."""

    def __init__(self, layer: nn.LayerNorm, num_clients: int, choices: Choices) -> None:
        super().__init__(layer, num_clients, choices)
        self.normalize = partial(F.layer_norm, normalized_shape=layer.normalized_shape, eps=layer.eps)
        self.dims = len(layer.normalized_shape)

    def forward(self, x: Tensor) -> Tensor:
        """Map a folded batch (G·B, …, features)."""
        y = self.normalize(x)
        shape = (self.num_clients, *[1] * (x.dim() - self.dims), *x.shape[-self.dims :])
        apart = y.unflatten(0, (self.num_clients, -1))
        apart = apart if self.weight is None else apart * self.weight.view(shape)
        return (apart if self.bias is None else apart + self.bias.view(shape)).flatten(0, 1)


class FoldedEmbedding(Folded):
    """`nn.Embedding` of each client, as one table of G·ids rows: ids (G·B, …) -> vectors (G·B, …, width)."""

    def __init__(self, layer: nn.Embedding, num_clients: int, choices: Choices) -> None:
        if layer.padding_idx is not None or layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
            raise NotFoldableError("an embedding with padding_idx, max_norm, scale_grad_by_freq or sparse")
        super().__init__(layer, num_clients, choices)

    def forward(self, ids: Tensor) -> Tensor:
        """Map a folded batch."""
        assert self.weight is not None
        size = self.weight.shape[1]
        firsts = torch.arange(self.num_clients, device=ids.device).view(-1, *[1] * ids.dim()) * size
        # An id outside the table must not read another client's.
        within = torch.where((ids >= 0) & (ids < size), ids, size * self.num_clients)
        places = (within.unflatten(0, (self.num_clients, -1)) + firsts).flatten(0, 1)
        return F.embedding(places, self.weight.flatten(0, 1))


FOLDED: dict[type[nn.Module] | str, Any] = {  # by class, and timm's by name
    nn.Linear: FoldedLinear,
    nn.Conv2d: FoldedConv2d,
    FactorizedLinear: FoldedFactorizedLinear,
    FactorizedConv2d: FoldedFactorizedConv2d,
    nn.GroupNorm: FoldedGroupNorm,
    "timm.layers.norm.GroupNorm": FoldedGroupNorm,
    nn.LayerNorm: FoldedLayerNorm,
    "timm.layers.norm.LayerNorm": FoldedLayerNorm,
    nn.Embedding: FoldedEmbedding,
}


def fold(model: nn.Module, num_clients: int, choices: Choices) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the folded model, and its parameters and buffers (G, …) by the names that they have in `model`.

    A bare parameter of any other module is shown to it once for every sample, shape (G·B, …): enough for learned
    positions that are added to a sequence. Whether a model agrees is for the caller to check.

    Raises:
        NotFoldableError: a kind of layer with buffers (batch norm) or with arithmetic unknown here, tied weights.
    """
    folded = deepcopy(model)
    replaced: dict[nn.Module, nn.Module] = {}
    for name, module in list(folded.named_modules()):
        kind = FOLDED.get(type(module)) or FOLDED.get(name_of(module))
        if kind is not None:
            replaced[module] = kind(module, num_clients, choices)
        elif any(True for _ in module.buffers(recurse=False)):
            raise NotFoldableError(f"{name}, a {type(module).__name__} with buffers")
    _refuse_tied(model)
    for parent in list(folded.modules()):
        for name, module in list(parent._modules.items()):
            if module in replaced:
                parent._modules[name] = replaced[module]
    folded = replaced.get(folded, folded)
    for module in list(folded.modules()):
        if not isinstance(module, Folded) and module._parameters:
            _fold_bare(module, num_clients)
    return folded, {name.replace(BARE, ""): tensor for name, tensor in folded.state_dict(keep_vars=True).items()}


BARE = "_of_clients"  # ends the names of the bare parameters on a client axis


def _fold_bare(module: nn.Module, num_clients: int) -> None:
    """Keep the module's own parameters on a client axis, and show it one value a sample."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    for name in names:
        parameter = cast(nn.Parameter, module._parameters.pop(name))
        module.register_parameter(name + BARE, _repeat(parameter, num_clients))

    def show(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        for name in names:
            setattr(module, name, getattr(module, name + BARE).repeat_interleave(len(inputs[0]) // num_clients, dim=0))

    module.register_forward_pre_hook(show)


def _refuse_tied(model: nn.Module) -> None:
    """Weights that two layers share would come apart."""
    owners = [id(parameter) for module in model.modules() for parameter in module._parameters.values()]
    owners = [owner for owner in owners if owner != id(None)]
    if len(set(owners)) < len(owners):
        raise NotFoldableError("tied weights")


def _geometry(layer: Any) -> Geometry:
    if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise NotFoldableError(f"a convolution with padding={layer.padding!r}, padding_mode={layer.padding_mode!r}")
    return Geometry(layer.stride, layer.padding, layer.dilation)


def _repeat(parameter: nn.Parameter, times: int) -> nn.Parameter:
    repeated = parameter.detach().expand(times, *parameter.shape).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(repeated, parameter.requires_grad)
