"""Images with channels innermost ("channels last"), there and back.

Convolutions to a few channels run faster on such images. Layers hand an image on in the layout in which it came, and so
they do its gradient. Only where images end, flattened or pooled to a vector, does a gradient come back with channels
outermost, and every layer on its way would pay for reading the one layout beside the other. It is put right there.

A group norm of few channels a group is slow on such images (forward and backward 1.7 ms in place of 1.2 for 32 channels
in 16 groups), so these images are turned around before it and after.

That is so on a CPU. On a GPU torch's group norm hands such images on with channels outermost (pytorch#111824), so that
every norm would force two changes of layout; there images keep their channels outermost. Not measured here.

And not where a 1×1 convolution with a stride has few input channels: its weights' gradient is then computed beyond the
memory that oneDNN has for it (oneDNN#6035, with torch 2.15 on AVX2), which ends in a crash, in a loop or in nothing.
"""

import torch
from torch import Tensor, nn

from sharding import FactorizedConv

ENDS = (nn.Flatten, nn.AdaptiveAvgPool2d)
FEW_CHANNELS = 16  # the widest block of channels in oneDNN's kernels
SMALL_GROUP = 8  # from this many channels a group on, torch's group norm reads channels innermost at full width


def channels_last(inputs: Tensor) -> Tensor:
    """Return images (B, C, H, W) on a CPU with channels innermost; anything else as it is."""
    on_cpu = inputs.device.type == "cpu"
    return inputs.contiguous(memory_format=torch.channels_last) if on_cpu and inputs.dim() == 4 else inputs


def keep_memory_format(model: nn.Module) -> nn.Module:
    """Let gradients come back to a model's images in the layout of these, and return the model."""
    for module in model.modules():
        if isinstance(module, ENDS):
            module.register_forward_pre_hook(_put_right)
        elif isinstance(module, nn.Conv2d | FactorizedConv) and _is_unsafe(module):
            module.register_forward_pre_hook(_channels_outermost)
        elif isinstance(module, nn.GroupNorm) and module.num_channels // module.num_groups < SMALL_GROUP:
            module.register_forward_pre_hook(_channels_outermost)
            module.register_forward_hook(_channels_innermost)
    return model


def _is_unsafe(layer: nn.Conv2d | FactorizedConv) -> bool:
    """Tell whether oneDNN writes beyond its memory where this layer's images have their channels innermost."""
    pointwise, strided = max(layer.kernel_size) == 1, max(layer.stride) > 1
    return pointwise and strided and layer.in_channels // layer.groups < FEW_CHANNELS


def _channels_outermost(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (inputs[0].contiguous(), *inputs[1:])


def _channels_innermost(module: nn.Module, inputs: tuple[Tensor, ...], images: Tensor) -> Tensor:
    return channels_last(images)


def _put_right(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    images = inputs[0]
    if images.requires_grad and images.dim() == 4 and not images.is_contiguous():
        images.register_hook(channels_last)
