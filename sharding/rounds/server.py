"""The server of federated training: it holds the model, cuts shards, averages the updates and takes its step.

One round is `plan`, `average`, `step`; `round` does all three with a function that trains a client's shard.

The server's step takes the pseudo-gradient Δ = average − W for a negative gradient, so that any torch optimizer
that needs no closure (all but `LBFGS`) can take it (Reddi et al., "Adaptive Federated Optimization", ICLR 2021). It
acts on weights, since singular vectors have another basis in every round. So momentum costs a client neither bytes nor
work, and it also moves the terms that a round does not draw. Some optimizers by the names that papers give them:

- FedAvg: `SGD(lr=1)`, which makes the average the new model; a smaller lr is the server's rate η_g.
- FedAvgM: `SGD(lr, momentum)`: m ← βm + Δ, W ← W + η_g m. Hsu, Qi & Brown 2019 (arXiv 1909.06335).
- FedACG: `SGD(lr, momentum, nesterov=True)`: clients are sent W + η_g βm, the point that the server expects to reach
  next, and correct its course. The model is kept at that point. Kim et al., CVPR 2024.
- FedAdam: `Adam(lr, betas=(0.9, 0.99), eps=1e-3)`; FedYogi: `sharding.FedYogi`.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.swa_utils import AveragedModel

from sharding.errors import UserError, join_first, safe_repr
from sharding.matrices.values import as_real, computable, find_nonfinite
from sharding.modules.state import is_statistic, is_variance
from sharding.modules.wrappers import (
    distribute_like,
    is_distributed,
    named_buffers,
    named_modules,
    named_parameters,
    named_state,
)
from sharding.rounds.aggregation.aggregate import Average, Outcome
from sharding.rounds.aggregation.max_share import CappedAverage
from sharding.rounds.failures import Failure, one_line
from sharding.rounds.frozen import Frozen
from sharding.rounds.optim import check_optimizer
from sharding.rounds.plan import Client, Plan
from sharding.rounds.planner import ShardPlanner
from sharding.rounds.privacy.average import PrivateAverage
from sharding.rounds.privacy.gaussian import Gaussian
from sharding.rounds.shard import Shard, Update
from sharding.validation import is_number, typed


class Server:
    """Hold the model and run rounds of federated training.

    A plain server with the strategy `collective` runs the published algorithm. ``python -m train`` has other defaults,
    for which 0.02 is a good first learning rate::

        model = merge(factorize(model, median))  # a low-rank start; median is that of the clients' keep ratios
        optimizer = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.8, nesterov=True)
        server = Server(model, ShardPlanner("top_n"), optimizer, iterate_average(model))
        for number in range(rounds):
            server.round(number, keep_ratios, train, num_samples)
        evaluate(server.result)

    A model that `factorize` made is trained in its factors. To fine-tune a pretrained model, let each client keep the
    frozen part, which it receives once::

        model = factorize(pretrained, largest, residual_format="int4")  # largest is the largest keep ratio of a client
        server = Server(model, ShardPlanner("top_n"))
        data = server.frozen.to_bytes()  # client_model(structure, shard, frozen=Frozen.from_bytes(data))

    An optimizer with momentum acts on the factors then, which keep their basis from round to round.

    Args:
        model: a dense or factorized model, which is trained in place.
        planner: draws the terms of each client. Which layers are sharded is decided here, once.
        optimizer: takes the server's step; of the model's parameters. `torch.optim.SGD(lr=1)`, FedAvg, by default.
        averaged: the average of the rounds' models (`iterate_average`), if the average is evaluated.
        max_share: the largest share of one client in the weight of the updates that count, whatever size it reports,
            in (0, 1]; 1 for no bound. The ⌊1/max_share⌋ heaviest updates of a round are kept in memory.
        privacy: the privacy of each client, by `sharding.Gaussian`: rounds then release noisy sums, with equal weights.

    Attributes:
        layers: the sharded layers of the model, by name.

    Raises:
        UserError: the optimizer has a parameter that is not the model's, or lacks one that trains, or needs a closure;
            the average is of another model; max_share is outside (0, 1]; privacy with max_share, or with running
            statistics; or as `ShardPlanner.checked_layers`.
    """

    @typed
    def __init__(
        self,
        model: nn.Module,
        planner: ShardPlanner,
        optimizer: Optimizer | None = None,
        averaged: AveragedModel | None = None,
        max_share: float = 1.0,
        privacy: Gaussian | None = None,
    ) -> None:
        self.model, self.planner, self.averaged, self.max_share = model, planner, averaged, max_share
        self.privacy = privacy
        if not (is_number(max_share) and 0 < max_share <= 1):
            raise UserError(f"max_share is {safe_repr(max_share)}; pass a number above 0 and at most 1, such as 0.5")
        if privacy is not None:
            _check_private(model, max_share)
        parameters = dict(named_parameters(model))
        if optimizer is None and parameters:
            optimizer = SGD(parameters.values(), lr=1.0)
        if optimizer is not None:
            check_optimizer(optimizer)
        self.optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        if any(id(parameter) not in self._names for parameter in self._optimized()):
            raise UserError("the optimizer has parameters of another model; make it with model.parameters()")
        self._check_optimized({name: part for name, part in parameters.items() if part.requires_grad})
        if averaged is not None and _shapes(averaged) != _shapes(model):
            raise UserError("the average is of another model; make it with iterate_average(model)")
        self.layers = planner.checked_layers(model)

    @property
    def frozen(self) -> Frozen:
        """What each client needs once, besides its shards; without tensors where nothing is frozen."""
        return Frozen.of(self.model, self.layers)

    @property
    def result(self) -> nn.Module:
        """The model to evaluate: the average of the rounds' models if there is one, else the last model."""
        return self.model if self.averaged is None else self.averaged.module

    def round(
        self,
        round: int,
        keep_ratios: Mapping[Client, float],
        train: Callable[[Client, Shard], Update | Failure | None],
        num_samples: Mapping[Client, float] | None = None,
    ) -> Outcome:
        """Run one round and return which clients were averaged in.

        Args:
            round: the round's number, from 0; the draws depend on it and on the planner's seed.
            keep_ratios: r of each client that takes part.
            train: trains a client's shard and returns the update (`train_shard`); a `Failure`, or None, where the
                client failed.
            num_samples: D_c, the clients' weights; None for equal ones.

        Raises:
            UserError: a client of `keep_ratios` is not in `num_samples`.
        """
        plan = self.plan(keep_ratios, round)
        if isinstance(num_samples, Mapping) and (missing := [client for client in plan if client not in num_samples]):
            raise UserError(f"num_samples lacks {join_first(missing)}; give the samples of every client of keep_ratios")
        average = self.average(plan, num_samples)
        for client, shard in plan.shards():
            average.add(client, train(client, shard))
        return self.step(average)

    @typed
    def plan(self, keep_ratios: Mapping[Client, float], round: int) -> Plan:
        """Draw the terms of each of these clients, from the layers that were sharded when the server was made.

        Raises:
            UserError: such a layer has been replaced, a client is not one of `privacy`; or as `ShardPlanner.plan`.
        """
        modules = dict(named_modules(self.model))
        if replaced := [name for name, layer in self.layers.items() if modules.get(name) is not layer]:
            raise UserError(f"{join_first(replaced)} was replaced since the server was made; make a new server")
        if self.privacy is None:
            return self.planner.plan(self.model, keep_ratios, round, self.layers)
        self.privacy.check(keep_ratios)
        return self.planner.plan(self.model, keep_ratios, round, self.layers, self.privacy.expected)

    @typed
    def plan_evaluation(self, keep_ratios: Mapping[Client, float], round: int) -> Plan:
        """Give each of these clients the largest terms of `result` that it can afford, to evaluate them.

        Where the strategy sends whole weights, each client gets the whole result.
        """
        planner, modules = self.planner, dict(named_modules(self.result))
        if planner.strategy.allocate is not None:
            planner = ShardPlanner("top_n", compression=planner.compression, tail_format=planner.tail_format)
        return planner.plan(self.result, keep_ratios, round, {name: modules[name] for name in self.layers})

    @typed
    def average(
        self, plan: Plan, num_samples: Mapping[Client, float] | None = None, total: float | None = None
    ) -> Average:
        """Return an empty average that takes a round's updates one by one, with the server's `max_share`.

        Args:
            plan: the plan of this round.
            num_samples: D_c, or D_c/p_c where clients were sampled; None for equal weights. An update of a client that
                is not in it does not count.
            total: the number of all samples that might have counted, where clients were sampled; see `Average`.

        Raises:
            UserError: num_samples is given with privacy, or total is not a finite number above 0.
        """
        if self.privacy is not None:
            if num_samples is not None or total is not None:
                raise UserError("with privacy all clients count alike: leave num_samples and total out")
            return PrivateAverage(plan, self.privacy, self._names.values())
        if num_samples is None:
            num_samples = dict.fromkeys(plan, 1.0)
        if total is not None and not (is_number(total) and total > 0):
            raise UserError(f"total is {total!r}; pass a finite number above 0")
        if total is None and plan and not any(client in num_samples for client in plan):
            warnings.warn("num_samples has no client of the plan, so no update counts", stacklevel=3)
        return self._average(plan, num_samples, total)

    @typed
    def average_as_reported(self, plan: Plan) -> Average:
        """Return an empty average as `average`, to which each update brings its weight: see `Average.add`.

        Raise a UserError with privacy.
        """
        if self.privacy is not None:
            raise UserError("with privacy all clients count alike: use Server.average(plan)")
        return self._average(plan, None, None)

    def _average(self, plan: Plan, weights: Mapping[Client, float] | None, total: float | None) -> Average:
        if self.max_share == 1:
            return Average(plan, weights, total)
        return CappedAverage(plan, weights, total, self.max_share)

    @typed
    @torch.no_grad()
    def step(self, average: Average) -> Outcome:
        """Take the optimizer's step by the average's pseudo-gradient; return which clients were averaged in.

        Buffers, such as the statistics of batch norms, take their average. Where no update counts, the model stays as
        it is, and enters the average of models once more.

        Raises:
            UserError: the model is not the one that the plan was made from, or the step has made a weight NaN or Inf:
                updates are finite, but the optimizer's learning rate is far too high.
        """
        delta, outcome = average.finish()
        if delta:
            self._move(delta)
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)
        return outcome

    def _move(self, delta: dict[str, Tensor]) -> None:
        state = named_state(self.model)
        if missing := sorted(delta.keys() - state.keys()):
            raise UserError(f"the model has no {join_first(missing)}; step the model that the plan was made from")
        if other := [name for name, change in delta.items() if as_real(state[name]).shape != change.shape]:
            raise UserError(f"the model has {join_first(other)} in other shapes; step the model of the plan")
        moved = {name: state[name] for name in delta if isinstance(state[name], nn.Parameter)}
        self._check_optimized(moved)
        if self.optimizer is not None:
            self.optimizer.zero_grad()  # gradients from before would move parameters that are frozen now
        for name, change in delta.items():
            entry = state[name]
            if name in moved:
                gradient = torch.view_as_complex(change.neg_()) if entry.is_complex() else change.neg_()
                gradient = distribute_like(gradient, entry)
                if not is_distributed(entry) and gradient.stride() != entry.stride():
                    gradient = torch.empty_like(entry).copy_(gradient)  # fused optimizers go by the order of memory
                entry.grad = gradient
            else:
                averaged = computable(as_real(entry)) + computable(distribute_like(change, as_real(entry)))
                # Rounding, or a step beyond the average of sampled clients, can make a variance negative.
                as_real(entry).copy_(averaged.clamp(min=0) if is_variance(name) else averaged)
        delta.clear()  # its memory is the gradients'
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
            if (spoiled := find_nonfinite(moved | self._optimizer_state())) is not None:
                raise UserError(
                    f"the server's step made {spoiled} NaN or Inf; lower the learning rate of the server's optimizer "
                    "after loading an earlier checkpoint"
                )

    def state_dict(self) -> dict[str, Tensor]:
        """Return what a resumed run needs besides the model: the state of the optimizer and of the average of models.

        Returns:
            Tensors by ``optimizer/<optimizer>/<weight>/<part>`` and ``average/<name>``; numbers and tuples of them, as
            tensors, by ``numbers/<optimizer>/<weight>/<part>`` and ``groups/<optimizer>/<index>/<option>``.
        """
        state = {f"optimizer/{name}": value for name, value in self._optimizer_state().items()}
        numbers = {f"numbers/{name}": value for name, value in self._optimizer_state((int, float)).items()}
        for index, group in enumerate([] if self.optimizer is None else self.optimizer.param_groups):
            options = {option: value for option, value in group.items() if _is_numeric(value)}
            kind = type(self.optimizer).__name__
            numbers |= {f"groups/{kind}/{index}/{option}": value for option, value in options.items()}
        for name, value in numbers.items():
            state[name] = value if isinstance(value, Tensor) else torch.from_numpy(np.asarray(value))  # in 64 bits
        if self.averaged is not None:
            state |= {f"average/{name}": value for name, value in self.averaged.state_dict().items()}
        return state

    @typed
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume from what `state_dict` returned. The optimizer gets its learning rate from there, as in torch.

        Raises:
            UserError: the state is not one that `state_dict` returned, or names another optimizer or other weights; or
                one of them has no average of models.
        """
        parts: dict[str, dict[str, Any]] = {"optimizer": {}, "numbers": {}, "groups": {}, "average": {}}
        for name, value in state.items():
            kind, _, rest = name.partition("/")
            if kind not in parts:
                raise UserError(f"{name} is not of a server; pass what Server.state_dict returned")
            parts[kind][rest] = value
        if bool(parts["average"]) != (self.averaged is not None):
            raise UserError("only one of the state and the server has an average of models")
        numbers = {name: value.item() for name, value in parts["numbers"].items()}
        self._load_optimizer(parts["optimizer"] | numbers, parts["groups"])
        if self.averaged is not None:
            try:
                self.averaged.load_state_dict(parts["average"])
            except RuntimeError as error:
                raise UserError(f"the average is of another model: {one_line(error)}") from error

    def _check_optimized(self, parameters: Mapping[str, nn.Parameter]) -> None:
        optimized = {id(parameter) for parameter in self._optimized()}
        if missing := [name for name, parameter in parameters.items() if id(parameter) not in optimized]:
            raise UserError(f"the server's optimizer lacks {join_first(missing)}; make it with model.parameters()")

    def _optimized(self) -> list[nn.Parameter]:
        """Return the optimizer's parameters, in the order of its state."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def _optimizer_state(self, types: type | tuple[type, ...] = Tensor) -> dict[str, Any]:
        """Return the optimizer's tensors, or its numbers, by ``<optimizer>/<weight>/<part>``."""
        states = {} if self.optimizer is None else self.optimizer.state
        return {
            f"{type(self.optimizer).__name__}/{self._names[id(parameter)]}/{part}": value
            for parameter, parts in states.items()
            for part, value in parts.items()
            if isinstance(value, types)
        }

    def _load_optimizer(self, state: Mapping[str, Any], groups: Mapping[str, Tensor]) -> None:
        if self.optimizer is None:
            return
        indices = {self._names[id(parameter)]: index for index, parameter in enumerate(self._optimized())}
        loaded: dict[int, dict[str, Any]] = {}
        options = [dict(group) for group in self.optimizer.state_dict()["param_groups"]]
        for entry, value in state.items():
            kind, _, rest = entry.partition("/")
            name, _, part = rest.rpartition("/")
            if kind != type(self.optimizer).__name__ or name not in indices:
                raise UserError(f"{entry} is the state of another optimizer or model")
            loaded.setdefault(indices[name], {})[part] = value
        for entry, value in groups.items():
            kind, index, option = entry.split("/")
            if kind != type(self.optimizer).__name__ or int(index) >= len(options):
                raise UserError(f"{entry} is of another optimizer")
            numbers = tuple(value.tolist()) if value.dim() else value.item()
            is_tensor = isinstance(options[int(index)].get(option), Tensor)
            options[int(index)][option] = value if is_tensor else numbers
        self.optimizer.load_state_dict({"state": loaded, "param_groups": options})


def _check_private(model: nn.Module, max_share: float) -> None:
    """Raise a `UserError` for weights of single clients, and for a model whose buffers clients compute."""
    if max_share != 1:
        raise UserError(f"with privacy all clients count alike: leave max_share={max_share:g} out")
    if statistics := [name for name, _ in named_buffers(model) if is_statistic(name)]:
        raise UserError(
            f"privacy needs a model without running statistics of its data, and this one has {join_first(statistics)}; "
            "use group norms (GroupNorm) in the place of batch norms"
        )


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in named_parameters(model)}


def _is_numeric(value: object) -> bool:
    """Whether an optimizer's option is a number, such as its learning rate, a tensor, or a tuple of numbers."""
    numbers = value if isinstance(value, tuple) else (value,)
    return isinstance(value, Tensor) or all(isinstance(number, int | float) for number in numbers)
