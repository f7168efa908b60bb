r"""A loss, an optimizer and a schedule of the learning rate.

Use them all with this command:

python -m train run configs/quickstart.yaml --import examples.own_training local.loss=smoothed local.schedule=warm_up \
    local.optimizer='{name: adam, lr: 0.003, beta2: 0.99}'
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sharding.optim import factorized_layers, frobenius_decay
from train.config.registries import LOSSES, OPTIMIZERS, SCHEDULES, cosine


def smoothed(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Cross-entropy with a tenth of the label spread over all classes."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=ignore_index, label_smoothing=0.1)


class Adam:
    """Adam on the client's factors, with the decay of UΩVᵀ. It scales its own steps, so nothing is clipped.

    Args:
        model: the client's, with its shard.
        decay: its strength.
        clip: not used.
        decay_of: not used.
        lr: of this round.
        beta1: β₁.
        beta2: β₂.
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float,
        clip: Any,
        decay_of: Any,
        lr: float = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
    ) -> None:
        self.layers, self.decay = factorized_layers(model), decay
        self.adam = torch.optim.Adam(model.parameters(), lr, betas=(beta1, beta2))

    def step(self, loss: Tensor) -> None:
        """Take one step."""
        self.adam.zero_grad()
        (loss + self.decay * frobenius_decay(self.layers)).backward()
        self.adam.step()


def warm_up(lr: float, t: int, rounds: int) -> float:
    """Rise over the first tenth of the rounds, then fall as half a cosine."""
    return cosine(lr, t, rounds) * min(1.0, (t + 1) / (0.1 * rounds))


LOSSES["smoothed"] = smoothed
OPTIMIZERS["adam"] = Adam
SCHEDULES["warm_up"] = warm_up
