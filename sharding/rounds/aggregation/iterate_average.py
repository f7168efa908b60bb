"""The average of a run's models, with the most weight on the latest: the model that a server evaluates and keeps.

Each round's model leans toward the data of its cohort. Clients resume from the last model; the average, in which these
leanings cancel, is the model to use.

Polynomial-decay averaging: w̄ₜ = (1 − aₜ) w̄ₜ₋₁ + aₜ wₜ with aₜ = (η + 1)/(t + η). The weight of round s grows as s^η, so
that a poor start is forgotten, and you choose neither a number of rounds nor a horizon (Shamir & Zhang, ICML 2013,
Section 4). With η = 8, half of the weight is on the last 7 % of the rounds.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from sharding.factorization.support import TO_REPLACE, check_supported
from sharding.modules.copies import copied
from sharding.modules.wrappers import unwrap
from sharding.validation import typed

ETA = 8


@typed
def iterate_average(model: nn.Module) -> AveragedModel:
    """Return an average of a model's parameters: call `update_parameters(model)` each round, and use its `module`.

    Buffers are those of the last round. `state_dict` holds all that is needed to resume.

    Args:
        model: the server's; only read. `module` has its structure, and parameters of its shapes.

    Source: Shamir & Zhang 2013 (arXiv 1212.1824), Section 4, with η = 8.
    """
    check_supported(model, TO_REPLACE)
    average = AveragedModel(nn.Identity(), multi_avg_fn=_toward)
    average.module = copied(unwrap(model))  # torch itself would copy it again, and copies no pruned model
    return average


def _toward(averages: Sequence[Tensor], parameters: Sequence[Tensor], rounds: Tensor | int) -> None:
    """Move the averages of a number of rounds toward the parameters of one more round."""
    if not (averages[0].is_floating_point() or averages[0].is_complex()) or averages[0].element_size() == 1:
        torch._foreach_copy_(list(averages), list(parameters))  # integers and float8 are frozen and have no arithmetic
    else:
        torch._foreach_lerp_(list(averages), list(parameters), (ETA + 1) / (float(rounds) + 1 + ETA))
