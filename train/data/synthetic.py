"""Synthetic(α, β): every client has its own logistic model, and inputs around its own center.

Li et al. 2020, "Federated Optimization in Heterogeneous Networks" (FedProx), Section 5.1: client k draws u ~ N(0, α²),
W and b ~ N(u, 1), B ~ N(0, β²), v ~ N(B, 1); its inputs are x ~ N(v, Σ) with Σ_jj = j^−1.2, the class of each is the
largest entry of Wx + b. Sizes are in proportion to 1/k. The first tenth of each client's samples is for testing.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from sharding.errors import UserError
from sharding.rng import generator
from train.data.dataset import EMPTY, Dataset, Split
from train.data.quantity_skew import power_law_sizes

FEATURES, CLASSES = 60, 10
SYNTHETIC = Dataset("synthetic", EMPTY, EMPTY, num_classes=CLASSES, input_shape=(FEATURES,))


def load_synthetic(
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 100,
    samples: int = 20_509,
    seed: int = 0,
) -> Dataset:
    """Draw the samples; `natural` has the indices of each client's.

    Args:
        alpha: α, how unlike the clients' models are, as published. It adds one number to all of a client's logits, and
            so changes no class.
        beta: β, how unlike their inputs are.
        clients: number of clients.
        samples: the number of samples of all clients together, those for testing included.
        seed: the seed of all draws.

    Raises:
        UserError: an option is out of its range.
    """
    if min(alpha, beta, seed) < 0 or not 1 <= clients <= samples:
        raise UserError(
            f"synthetic: alpha={alpha}, beta={beta} and seed={seed} must not be negative, "
            f"clients={clients} must be 1 to samples={samples}"
        )
    rng = generator(seed, "synthetic")
    drawn = [_draw_client(int(size), alpha, beta, rng) for size in power_law_sizes(samples, clients, rng, alpha=1.0)]
    train, test = zip(*drawn, strict=True)
    ends = np.cumsum([len(part) for part in train])
    natural = np.split(np.arange(ends[-1]), ends[:-1])
    return replace(SYNTHETIC, train=_join(train), test=_join(test), natural=natural)


def _draw_client(size: int, alpha: float, beta: float, rng: np.random.Generator) -> tuple[Split, Split]:
    """Return a client's samples for training and for testing."""
    shift, center = rng.normal(0, alpha), rng.normal(0, beta)
    weight, bias = rng.normal(shift, 1, (FEATURES, CLASSES)), rng.normal(shift, 1, CLASSES)
    scales = np.arange(1, FEATURES + 1) ** -0.6  # standard deviations
    x = rng.normal(rng.normal(center, 1, FEATURES), scales, (size, FEATURES))
    inputs, targets = torch.from_numpy(x).float(), torch.from_numpy((x @ weight + bias).argmax(axis=1))
    tenth = size // 10
    return Split(inputs[tenth:], targets[tenth:]), Split(inputs[:tenth], targets[:tenth])


def _join(parts: Sequence[Split]) -> Split:
    return Split(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))
