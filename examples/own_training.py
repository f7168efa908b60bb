r"""A loss, an optimizer and a schedule of the learning rate.

Use them all with this command:

python -m train run configs/quickstart.yaml --import examples.own_training local.loss=smoothed local.schedule=warm_up \
    local.optimizer='{name: sign_sgd, lr: 0.0003, decay: 0.01}'
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer

from train.registries import LOSSES, OPTIMIZERS, SCHEDULES, cosine


def smoothed(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Cross-entropy with a tenth of the label spread over all classes."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, label_smoothing=0.1)


class SignSGD(Optimizer):
    """SGD by the sign of each gradient: any torch optimizer can train the clients' factors.

    Args:
        params: the client's parameters.
        lr: the learning rate of this round.
        decay: the decay of the parameters.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["decay"]).sub_(parameter.grad.sign(), alpha=group["lr"])


def warm_up(lr: float, t: int, rounds: int) -> float:
    """Rise over the first tenth of the rounds, then fall as half a cosine."""
    return cosine(lr, t, rounds) * min(1.0, (t + 1) / (0.1 * rounds))


LOSSES["smoothed"] = smoothed
OPTIMIZERS["sign_sgd"] = SignSGD
SCHEDULES["warm_up"] = warm_up
