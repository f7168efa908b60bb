"""The small networks of the client-sampling studies: logistic regression, a perceptron, a convolutional network."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from models.options import positive
from sharding.errors import UserError


class MLP(nn.Sequential):
    """Perceptron on flattened inputs with a ReLU after each hidden layer.

    Args:
        input_shape: the shape of one input, which is flattened.
        num_classes: number of logits.
        hidden: widths of the hidden layers; 0 stands for none, which is logistic regression, and starts from zero.

    Raises:
        UserError: a width is negative.
    """

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, *, hidden: Sequence[int] = (64,)) -> None:
        widths = [width for width in hidden if width != 0]
        if widths:
            positive(hidden=widths)
        size = 1
        for extent in input_shape:
            size *= extent
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise([size, *widths]):
            layers += [nn.Linear(before, after), nn.ReLU()]
        last = nn.Linear([size, *widths][-1], num_classes)
        if not widths:
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
        super().__init__(*layers, last)


class CNN(nn.Module):
    """Two 5x5 convolutions, each followed by a ReLU and a 2x2 max-pool, and a perceptron on their features.

    McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Section 3, whose
    MNIST network has widths 32 and 64 and 512 hidden units. LeNet-5 has widths 6 and 16, and 120 and 84 hidden units;
    here the convolutions are padded, so that 28x28 images leave 7x7 features instead of 5x5.

    Args:
        input_shape: (channels, height, width); at least 4 by 4.
        num_classes: number of logits.
        widths: channels of the two convolutions.
        hidden: widths of the perceptron's hidden layers, as of `MLP`.

    Raises:
        UserError: the input is no image of that size, there are not two widths, or a number is not positive.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        widths: Sequence[int] = (8, 16),
        hidden: Sequence[int] = (64,),
    ) -> None:
        super().__init__()
        if len(input_shape) != 3:
            raise UserError(f"cnn reads images (channels, height, width), not inputs of shape {input_shape}")
        positive(widths=widths)
        if len(widths) != 2:
            raise UserError(f"widths={list(widths)} must be two numbers, the channels of two convolutions")
        channels, height, width = input_shape
        if min(height, width) < 4:
            raise UserError(f"cnn reads images of at least 4 by 4, not {height} by {width}")
        self.conv1 = nn.Conv2d(channels, widths[0], 5, padding=2)
        self.conv2 = nn.Conv2d(widths[0], widths[1], 5, padding=2)
        self.pool = nn.MaxPool2d(2)
        self.act = nn.ReLU()
        self.head = MLP((widths[1], height // 4, width // 4), num_classes, hidden=hidden)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, channels, height, width) to logits (batch, num_classes)."""
        return self.head(self._shrink(self.conv2(self._shrink(self.conv1(images)))))

    def _shrink(self, features: Tensor) -> Tensor:
        """Return the largest of each 2x2 block, or 0: pooling first gives the ReLU a quarter of the work.

        On CPU max-pooling is several times faster where channels are innermost.
        """
        return self.act(self.pool(features.contiguous(memory_format=torch.channels_last)))
