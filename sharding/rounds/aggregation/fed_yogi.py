"""FedYogi: Adam whose second moment moves by a bounded amount, so that it does not forget a rare large gradient."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sharding.errors import UserError
from sharding.matrices.values import as_real
from sharding.validation import is_number, typed


class FedYogi(Optimizer):
    """Yogi on the server: with g = −Δ, m ← β₁m + (1 − β₁)g and s ← s − (1 − β₂) g² sign(s − g²), W ← W − η m/(√s + τ).

    As published there is no correction of the first steps, and s starts at τ².

    Args:
        params: the model's parameters.
        lr: η, above 0.
        betas: β₁ and β₂, in [0, 1).
        tau: τ, above 0: the larger, the less adaptive.

    Raises:
        UserError: a number out of range.

    Source: Reddi et al., "Adaptive Federated Optimization", ICLR 2021 (arXiv 2003.00295), Algorithm 2.
    """

    @typed
    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 0.99),
        tau: float = 1e-3,
    ) -> None:
        numbers = len(betas) == 2 and all(map(is_number, (lr, tau, *betas)))
        if not (numbers and lr > 0 and tau > 0 and all(0 <= beta < 1 for beta in betas)):
            raise UserError(f"lr={lr!r}, betas={betas!r}, tau={tau!r}; choose lr and tau above 0 and betas in [0, 1)")
        super().__init__(params, {"lr": lr, "betas": betas, "tau": tau})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step by the parameters' gradients."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            (beta1, beta2), tau = group["betas"], group["tau"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                weight, gradient, state = as_real(parameter), as_real(parameter.grad), self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(weight)
                    state["exp_avg_sq"] = torch.full_like(weight, tau**2)
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.lerp_(gradient, 1 - beta1)
                grad_square = gradient.square()
                square.sub_(grad_square * (square - grad_square).sign(), alpha=1 - beta2)
                weight.addcdiv_(mean, square.sqrt().add_(tau), value=-group["lr"])
        return loss
