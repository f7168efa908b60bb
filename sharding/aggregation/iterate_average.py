"""The average of a run's models, the latest counting most: what a server evaluates and keeps.

The model of one round leans towards the data of its own cohort, that of the next towards other data. Clients go on from
the last model; whoever wants to use a model takes the average, in which these leanings cancel.

Polynomial-decay averaging, w̄ₜ = (1 − aₜ) w̄ₜ₋₁ + aₜ wₜ with aₜ = (η + 1)/(t + η): the weight of round s grows as s^η, so
that a poor start is forgotten, and neither the number of rounds nor a horizon has to be chosen (Shamir & Zhang, ICML
2013, Section 4). With η = 8 half of the weight is on the last 7 % of the rounds so far.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from sharding.modules.wrappers import unwrap

ETA = 8


def iterate_average(model: nn.Module) -> AveragedModel:
    """Return what averages a model's parameters: call its `update_parameters(model)` once a round, use its `module`.

    Buffers are those of the last round. `state_dict` has all it needs to go on.

    Args:
        model: the server's; only read. `module` has its structure, and parameters of its shapes.

    Source: Shamir & Zhang 2013 (arXiv 1212.1824), Section 4, with η = 8.
    """
    return AveragedModel(unwrap(model), multi_avg_fn=_towards)


def _towards(averages: Sequence[Tensor], parameters: Sequence[Tensor], rounds: Tensor | int) -> None:
    """Move the averages of so many rounds towards the parameters of one more."""
    torch._foreach_lerp_(list(averages), list(parameters), (ETA + 1) / (float(rounds) + 1 + ETA))
