"""A custom dataset and a custom model, each with its own options.

`python -m train run examples/moons.yaml data.noise=0.2 model.activation=gelu`
"""

from itertools import pairwise

import torch
from sklearn.datasets import make_moons
from torch import nn

from train.data import Dataset, Split
from train.registries import DATASETS, MODELS


def load_moons(*, noise: float = 0.1, seed: int = 0) -> Dataset:
    """Two interleaved half circles, 800 points to train on and 200 for testing; needs no folder."""
    points, labels = make_moons(1000, noise=noise, random_state=seed)
    inputs, targets = torch.from_numpy(points).float(), torch.from_numpy(labels).long()
    return Dataset(
        name="moons",
        train=Split(inputs[:800], targets[:800]),
        test=Split(inputs[800:], targets[800:]),
        num_classes=2,
        input_shape=(2,),
    )


class Perceptron(nn.Sequential):
    """Linear layers with an activation between them."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        num_classes: int,
        *,
        widths: tuple[int, ...] = (32, 32),
        activation: str = "relu",
    ) -> None:
        sizes = [*input_shape, *widths, num_classes]
        between = {"relu": nn.ReLU, "gelu": nn.GELU, "tanh": nn.Tanh}[activation]
        layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), between())]
        super().__init__(*layers[:-1])


DATASETS["moons"] = load_moons
MODELS["perceptron"] = Perceptron
