"""The method on one screen: train A, W and B of y = B tanh(W tanh(A x)), where no client receives the whole of W.

The library does the same for any model, on real devices: `sharding.Server.round` gives the same numbers as `one_round`.
"""

from argparse import ArgumentParser
from math import ceil

import torch
from torch import Tensor
from torch.nn import functional as F

from sharding import collective_inclusion, draw_terms
from sharding.rng import generator

Weights = tuple[Tensor, Tensor, Tensor]
Samples = tuple[Tensor, Tensor]


def one_round(
    weights: Weights, keep_ratios: dict[str, float], data: dict[str, Samples], t: int, lr: float = 0.1
) -> Weights:
    """Return A, W and B after round t; `data` has the inputs and targets of each client, `keep_ratios` its r."""
    A, W, B = weights
    u, magnitudes, v = torch.linalg.svd(W, full_matrices=False)  # W = Σ λᵢ uᵢ vᵢᵀ
    U, V = u * magnitudes.sqrt(), v.mT * magnitudes.sqrt()  # each side of a term has √λ
    sums, total = [torch.zeros_like(part) for part in (A, U, V, B)], 0
    holders = torch.zeros_like(magnitudes)  # by term, the samples of the clients that hold it

    for client, r in keep_ratios.items():
        alike = sum(other == r for other in keep_ratios.values())
        inclusion, omega = collective_inclusion(magnitudes, ceil(len(magnitudes) * r), alike)
        terms = draw_terms(inclusion, rng=generator(0, "draw", t, client, "2"))  # n of them, term i with chance πᵢ
        inputs, targets = data[client]
        trained = train((A, U[:, terms], V[:, terms], B), torch.tensor(omega[terms]), inputs, targets, lr)

        for i, part in enumerate(trained):  # what all clients hold, and the two sides of the terms of this one
            sums[i][:, terms if i in (1, 2) else slice(None)] += len(inputs) * part
        holders[terms] += len(inputs)
        total += len(inputs)

    mean_U, mean_V = (torch.where(holders > 0, s / holders, old) for s, old in ((sums[1], U), (sums[2], V)))
    return sums[0] / total, W + mean_U @ mean_V.mT - U @ V.mT, sums[3] / total


def train(parts: tuple[Tensor, ...], omega: Tensor, inputs: Tensor, targets: Tensor, lr: float) -> list[Tensor]:
    """Return a client's A, u, v and B after one epoch: clipping at τ = 10, and decay of U Ω Vᵀ by 1e-4."""
    A, u, v, B = parameters = [part.clone().requires_grad_() for part in parts]
    optimizer = torch.optim.SGD(parameters, lr, momentum=0.9)
    for x, y in zip(inputs.split(10), targets.split(10), strict=True):
        optimizer.zero_grad()
        hidden = torch.tanh(x @ A.mT) @ v * omega @ u.mT  # a factorized layer: two thin products
        decay = 1e-4 * (u * omega @ v.mT).square().sum()
        (F.cross_entropy(torch.tanh(hidden) @ B.mT, y) + decay).backward()
        for side in (u, v):
            side.grad *= (10 / omega).clamp(max=1)  # a rare term has a large ω, and would move too fast
        optimizer.step()
    return [part.detach() for part in parameters]


if __name__ == "__main__":
    ArgumentParser(description=__doc__).parse_args()
    random = torch.Generator().manual_seed(0)
    A, W, B = (torch.randn(n, 64, generator=random).double() / 8 for n in (64, 64, 10))
    ratios = {"phone": 0.1, "tablet": 0.25, "laptop": 0.25}
    inputs = {client: torch.randn(1000, 64, generator=random).double() for client in [*ratios, "test"]}
    samples = {client: (x, x[:, :10].argmax(1)) for client, x in inputs.items()}
    for number in range(20):
        A, W, B = one_round((A, W, B), ratios, samples, number, lr=0.01)
    x, y = samples["test"]
    guesses = (torch.tanh(torch.tanh(x @ A.mT) @ W.mT) @ B.mT).argmax(1)
    print(f"after 20 rounds: {(guesses == y).double().mean():.0%}")
