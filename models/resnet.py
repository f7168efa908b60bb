"""ResNet for small images: residual blocks with GroupNorm.

Batch statistics of unequal clients do not average, so federated ResNets normalize each image separately, over
groups of channels (Hsieh et al., "The Non-IID Data Quagmire", ICML 2020). The stem of the ImageNet network, a
7x7 convolution with stride 2 and a max-pool, would shrink a 32x32 image to 8x8 at once; here it is one 3x3
convolution with stride 1.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, Section 4.2 (the network for CIFAR).
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.options import positive
from sharding.errors import UserError
from sharding.factorization.shardable import ENDS, Patterns


def shortcut(_: str, layer: nn.Module) -> bool:
    """Return whether a layer is a 1×1 convolution: in this network, a shortcut between two stages."""
    return isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1)


class ResNetGN(nn.Module):
    """Residual network of basic blocks with GroupNorm, for images of any size; ResNet-18 by default.

    Stage i has `blocks[i]` blocks of `width`·2ⁱ channels; each stage but the first halves height and width. With
    `skip: null` in a configuration the shortcuts are sent whole, as in PriSM's public code, which factorizes no 1×1
    convolution.

    Args:
        input_shape: (channels, height, width) of an image.
        num_classes: number of logits.
        width: channels of the first convolution and the first stage.
        blocks: the number of residual blocks in each stage.
        groups: groups of channels that are normalized together; must divide `width`.
        stem_stride: the stride of the first convolution; 2 halves height and width at once, for a quarter of the work.
        zero_init_last: start as timm's ResNet does: the last norm of each branch at zero, so that a block begins as
            the identity, and `fc` as torch has it. By default norms start at one, and `fc` is normal of deviation 0.01.

    Raises:
        UserError: the input is not an image, a number is not positive, or `groups` does not divide `width`.
    """

    skip: ClassVar[Patterns] = (*ENDS, shortcut)
    checkpoint_stem = False  # set by `sharding.checkpoint_blocks`

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        width: int = 64,
        blocks: Sequence[int] = (2, 2, 2, 2),
        groups: int = 32,
        stem_stride: int = 1,
        zero_init_last: bool = False,
    ) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise UserError(f"resnet18_gn reads images (channels, height, width), not inputs of shape {input_shape}")
        positive(width=width, blocks=blocks, groups=groups, stem_stride=stem_stride)
        if width % groups:
            raise UserError(f"groups={groups} does not divide width={width}; choose a divisor of {width}")
        widths = [width * 2**stage for stage in range(len(blocks))]
        self.conv1 = nn.Conv2d(input_shape[0], width, kernel_size=3, stride=stem_stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(groups, width)
        self.act1 = nn.ReLU(inplace=True)
        self.stages = nn.Sequential(
            *(
                _stage(before, after, depth, groups)
                for before, after, depth in zip([width, *widths], widths, blocks, strict=False)
            )
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, BasicBlock) and zero_init_last:
                nn.init.zeros_(module.bn2.weight)
        if not zero_init_last:
            nn.init.normal_(self.fc.weight, std=0.01)
            nn.init.zeros_(self.fc.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Map float images (batch, channels, height, width) to logits (batch, num_classes)."""
        stem = checkpoint(self._stem, images, use_reentrant=False) if self.checkpoint_stem else self._stem(images)
        return self.fc(self.pool(self.stages(stem)).flatten(1))

    def _stem(self, images: Tensor) -> Tensor:
        return self.act1(self.norm1(self.conv1(images)))


class BasicBlock(nn.Module):
    """Two convolutions, each with a norm, added to their input, or to its shortcut where size or channels change.

    Its names and bits are those of timm's block.
    """

    def __init__(self, before: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        shortcut = None
        if stride != 1:
            shortcut = nn.Sequential(
                nn.Conv2d(before, after, kernel_size=1, stride=stride, bias=False), nn.GroupNorm(groups, after)
            )
        self.conv1 = nn.Conv2d(before, after, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.GroupNorm(groups, after)
        self.act1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.GroupNorm(groups, after)
        self.act2 = nn.ReLU(inplace=True)
        self.downsample = shortcut

    def forward(self, maps: Tensor) -> Tensor:
        """Map (batch, before, height, width) to (batch, after, height / stride, width / stride)."""
        branch = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(maps)))))
        branch += maps if self.downsample is None else self.downsample(maps)
        return self.act2(branch)


def _stage(before: int, after: int, depth: int, groups: int) -> nn.Sequential:
    """Chain `depth` blocks; the first takes `before` channels to `after`, and halves the size if they differ."""
    first = BasicBlock(before, after, 1 if before == after else 2, groups)
    return nn.Sequential(first, *(BasicBlock(after, after, 1, groups) for _ in range(depth - 1)))
