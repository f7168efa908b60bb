"""Keep images and their gradients in torch's channels-last memory format.

On a CPU, convolutions to a few channels run faster on such images. Layers pass an image on in its memory format, and
the backward pass does the same with the gradient. Where an image is flattened or pooled to a vector, its gradient comes
back contiguous, and every earlier layer would have to read two formats. A hook converts it there.

On a GPU torch's group norm returns contiguous images (pytorch#111824), so that every norm would force two conversions;
images stay contiguous there. This is not measured here.

V of a convolution is laid out as the filters that it is, which saves three operations a layer and step.

A 1×1 convolution with a stride and few input channels gets contiguous images too: the gradient of its weights is else
computed beyond the memory that oneDNN has for it (oneDNN#6035, with torch 2.15 on AVX2), which crashes or hangs.
"""

import torch
from torch import Tensor, nn

from sharding import FactorizedConv
from sharding.layers.conv import lay_out_filters

ENDS = (nn.Flatten, nn.AdaptiveAvgPool2d)
FEW_CHANNELS = 16  # the widest block of channels in oneDNN's kernels


def channels_last(inputs: Tensor) -> Tensor:
    """Return images (B, C, H, W) on a CPU in channels-last format; return anything else unchanged."""
    on_cpu = inputs.device.type == "cpu"
    return inputs.contiguous(memory_format=torch.channels_last) if on_cpu and inputs.dim() == 4 else inputs


def keep_memory_format(model: nn.Module) -> nn.Module:
    """Keep the gradients of a model's images in channels-last format, and V as filters; return the model."""
    for module in model.modules():
        if isinstance(module, ENDS):
            module.register_forward_pre_hook(_convert_gradient, with_kwargs=True)
        elif isinstance(module, nn.Conv2d | FactorizedConv) and _is_unsafe(module):
            module.register_forward_pre_hook(_to_contiguous, with_kwargs=True)
    return lay_out_filters(model)


def _is_unsafe(layer: nn.Conv2d | FactorizedConv) -> bool:
    """Return whether oneDNN writes beyond its memory for channels-last images of this layer."""
    pointwise, strided = max(layer.kernel_size) == 1, max(layer.stride) > 1
    return pointwise and strided and layer.in_channels // layer.groups < FEW_CHANNELS


def _to_contiguous(
    module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    images = (*inputs, *named.values())[0]
    return (images.contiguous(), *inputs[1:]), {name: value for name, value in named.items() if value is not images}


def _convert_gradient(module: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
    images = (*inputs, *named.values())[0]
    if images.requires_grad and images.dim() == 4 and not images.is_contiguous():
        images.register_hook(channels_last)
