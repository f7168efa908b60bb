"""Factorized layers in your own module: written with them, or made from a dense module.

python examples/own_module.py
"""

import argparse

import torch
from torch import Tensor, nn

from sharding import Energy, FactorizedConv, FactorizedLinear, factorize, merge


class Classifier(nn.Module):
    """A small network that has factorized layers from the start: 4 terms of each matrix, drop-in for the dense ones."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 32, 3, padding=1)
        self.body = FactorizedConv.from_dense(nn.Conv2d(32, 32, 3, padding=1), num_terms=4)
        self.hidden = FactorizedLinear.from_dense(nn.Linear(32 * 8 * 8, 64), num_terms=4)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (batch, 1, 8, 8) to logits (batch, 10)."""
        x = self.body(self.stem(images).relu()).relu()
        return self.head(self.hidden(x.flatten(1)).relu())


def train(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Take a few steps and return the last loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = torch.zeros(())
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def main() -> None:
    """Train, merge, and factorize what was merged."""
    torch.manual_seed(0)
    images, labels = torch.rand(64, 1, 8, 8), torch.randint(10, (64,))
    model = Classifier()
    print(f"trained in factors, loss {train(model, images, labels):.3f}")

    dense = merge(model)  # ordinary layers with the same function
    print(f"merged: {type(dense.hidden).__name__}, off by {(dense(images) - model(images)).abs().max():.0e}")

    again = factorize(dense, Energy(0.99))  # as many terms of each layer as hold 99 % of it
    print(again.factorize_report)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
