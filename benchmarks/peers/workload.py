"""The workload that every simulator gets: pfl-research's published CIFAR-10 benchmark. Needs only torch and numpy.

IID, 1,000 users of 50 images, 50 users a round, one local epoch of batches of 10, SGD 0.1, and its small network.
"""

import argparse
import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

USERS, PER_USER, COHORT, EPOCHS, BATCH, LR = 1000, 50, 50, 1, 10, 0.1
ROUNDS = int(os.environ.get("PEERS_ROUNDS", "5"))  # timed, after one that is not
FOLDER = Path(os.environ.get("PEERS_DATA", "."))


def no_arguments(text: str | None) -> None:
    """Show ``--help``; the script takes no other argument."""
    argparse.ArgumentParser(description=text).parse_args()


def network() -> nn.Module:
    """Two convolutions, a hidden layer, dropout: 1.6 million parameters, from the same seed."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(nn.Flatten(), nn.Linear(14 * 14 * 64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def samples(user: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a user's images, uint8 (50, 3, 32, 32), and classes, from a file, so that no simulator holds all of them."""
    images = np.fromfile(FOLDER / "images", np.uint8, PER_USER * 3 * 32 * 32, offset=user * PER_USER * 3 * 32 * 32)
    classes = np.fromfile(FOLDER / "classes", np.int64, PER_USER, offset=user * PER_USER * 8)
    return torch.from_numpy(images).view(PER_USER, 3, 32, 32), torch.from_numpy(classes)


def user_data(user: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a user's images as floats in −1…1, and classes."""
    images, classes = samples(user)
    return images.float() / 127.5 - 1, classes


def train(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """Train as the examples do: a plain loop over shuffled batches."""
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(targets)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()


class Stopwatch:
    """Records when rounds end, and prints the seconds of each but the first."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def lap(self) -> None:
        """Record the end of a round."""
        self._ends.append(perf_counter())

    def report(self, package: str | None = None) -> None:
        """Print the result and the versions of Python, torch and the peer's package, for the script that started it."""
        seconds, versions = np.diff(self._ends).tolist(), {name: version(name) for name in (package, "torch") if name}
        print("RESULT " + json.dumps({"seconds": seconds, "python": sys.version.split()[0], **versions}))
