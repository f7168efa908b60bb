"""The model, the data and the training loop: what is the same in any Flower app with torch."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from sharding import clip_and_decay

KEEP_RATIOS = {0: 0.1, 1: 0.25}  # of nodes whose number is even, and odd
NUM_PARTITIONS = 10  # nodes with the same number modulo this have the same data


def make_model():
    """Return a perceptron of 27 thousand parameters."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def load_data(partition=None):
    """Return the inputs and targets of a node's partition; without one, those for testing."""
    digits = load_digits()
    inputs, targets = torch.from_numpy(digits.data).float() / 16, torch.from_numpy(digits.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    test, training = order[:300], order[300:]
    indices = test if partition is None else training[partition % NUM_PARTITIONS :: NUM_PARTITIONS]
    return inputs[indices], targets[indices]


def fit(model, config, data):
    """Train for an epoch with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), config["lr"])
    # Clips the gradients, and decays UΩVᵀ in place of U and V.
    optimizer.register_step_pre_hook(clip_and_decay(model, config["clip"]))
    for inputs, targets in zip(data[0].split(10), data[1].split(10), strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    return {"num-examples": len(data[0]), "train_loss": loss.item()}


@torch.no_grad()
def test(model, config, data):
    """Return the accuracy."""
    correct = (model(data[0]).argmax(1) == data[1]).sum()
    return {"num-examples": len(data[0]), "accuracy": correct.item() / len(data[0])}
