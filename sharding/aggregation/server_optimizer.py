"""The server's step: it takes the difference between the clients' average and the model for a gradient.

Δ = average − W is the way that the clients want to go. Any optimizer can take it for a negative gradient (Reddi et al.,
"Adaptive Federated Optimization", ICLR 2021). The step acts on weights, since singular vectors have another basis in
every round. So momentum costs a client neither bytes nor work, and it also moves the terms that a round does not draw.

- `plain`: W ← W + η_g Δ.
- `momentum`: m ← βm + Δ, W ← W + η_g m. FedAvgM: Hsu, Qi & Brown 2019 (arXiv 1909.06335).
- `nesterov`: the same m, but clients are sent W + η_g βm, the point that the server expects to reach next, and correct
  its course. The model is kept at that point. FedACG: Kim et al., CVPR 2024; Nesterov's momentum.
- `adam`: FedAdam, with β₁ = β, β₂ = 0.99 and ε = 10⁻³; η_g is far below 1 then.
"""

import logging
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from sharding.errors import UserError, few, pick
from sharding.modules.finite import find_nonfinite
from sharding.modules.wrappers import named_parameters
from sharding.validation import is_number

log = logging.getLogger(__name__)

LARGEST_LR = 1e31  # torch's optimizers fail at one that float32 cannot hold, or ten times that

Make = Callable[[Iterable[Tensor], float, float], Optimizer]  # of (weights, η_g, β)

SERVER_OPTIMIZERS: dict[str, Make | None] = {
    "plain": None,
    "momentum": SGD,
    "nesterov": lambda weights, lr, momentum: SGD(weights, lr, momentum, nesterov=True),
    "adam": lambda weights, lr, momentum: Adam(weights, lr, (momentum, 0.99), eps=1e-3),
}


class ServerOptimizer:
    """Take the server's step after each average.

    `Server` calls it. Buffers and frozen weights keep the values that the average gave them.

    Args:
        model: the server's; its weights are changed in place.
        name: a key of `SERVER_OPTIMIZERS`.
        lr: η_g, above 0 and below `LARGEST_LR`.
        momentum: β in (0, 1); `plain` has none.

    Attributes:
        rate: the share of the way to the average that is the average's: η_g of `plain`, else all of it.

    Raises:
        UserError: an unknown name, or a number out of range.
    """

    def __init__(self, model: nn.Module, name: str = "plain", lr: float = 1.0, momentum: float = 0.9) -> None:
        make = pick(SERVER_OPTIMIZERS, name, "server optimizer")
        for what, value, most in (("server_lr", lr, LARGEST_LR), ("server_momentum", momentum, 1.0)):
            if not (is_number(value) and 0 < value < most):
                raise UserError(f"{what} is {value!r}; pass a number above 0 and below {most:g}")
        self._weights = dict(named_parameters(model)) if make else {}
        self._optimizer = make(self._weights.values(), lr, momentum) if make and self._weights else None
        self.rate = lr if make is None else 1.0
        self.remember()

    @torch.no_grad()
    def step(self) -> None:
        """Step from the model that was remembered last; a model that has not moved, as in a lost round, stays."""
        if self._optimizer is None:
            return
        ways = {name: old - self._weights[name] for name, old in self._old.items()}
        if not any(bool(way.any()) for way in ways.values()):
            return
        for name, way in ways.items():
            self._weights[name].copy_(self._old[name])
            self._weights[name].grad = way
        self._optimizer.step()
        self._optimizer.zero_grad()
        if (spoiled := find_nonfinite({name: self._weights[name] for name in ways} | self.state_dict())) is not None:
            log.warning(
                "skipped the server's step, which would make %s NaN or Inf, and reset its momentum; lower server_lr",
                spoiled,
            )
            for name, old in self._old.items():
                self._weights[name].copy_(old)
            self._optimizer.state.clear()
        self.remember()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors needed to resume, by ``<weight>/<part>``; none before the first step."""
        held = self._optimizer.state_dict()["state"] if self._optimizer is not None else {}
        names = list(self._weights)
        return {f"{names[place]}/{part}": value for place, its in held.items() for part, value in its.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume from what `state_dict` returned, and from the model as it is now.

        A state without tensors, as before the first step, is logged: from there on, momentum starts at zero.

        Raises:
            UserError: the state is of another optimizer or model.
        """
        self.remember()
        if self._optimizer is None:
            return
        if not state:
            log.warning("the state has no momentum, as before the first step: the server's momentum starts at zero")
            return
        moved = {key.rpartition("/")[0] for key in state}
        moved |= {name for name, weight in self._weights.items() if weight.requires_grad}
        shapes = {
            f"{name}/{part}": torch.Size() if part == "step" else weight.shape
            for name, weight in self._weights.items()
            if name in moved
            for part in self._parts()
        }
        given = {key: value.shape for key, value in state.items()}
        if differing := sorted(key for key in shapes.keys() | given.keys() if shapes.get(key) != given.get(key)):
            raise UserError(f"this state is of another optimizer or model: {few(differing)} differ")
        held = self._optimizer.state_dict()
        for place, name in enumerate(self._weights):
            if name in moved:
                held["state"][place] = {part: state[f"{name}/{part}"] for part in self._parts()}
        self._optimizer.load_state_dict(held)

    def _parts(self) -> tuple[str, ...]:
        """Return the names of the tensors that the optimizer keeps for a weight."""
        return ("step", "exp_avg", "exp_avg_sq") if isinstance(self._optimizer, Adam) else ("momentum_buffer",)

    def remember(self) -> None:
        """Take the model as it is now for the start of the next step; each step ends with this.

        Weights that are frozen now stay out of that step.
        """
        trained = ((name, weight) for name, weight in self._weights.items() if weight.requires_grad)
        self._old = {name: weight.detach().clone() for name, weight in trained}
