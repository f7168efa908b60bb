"""Capture a training step as a CUDA graph, which one call launches, in place of a thousand kernels launched one by one.

A graph repeats the same kernels on the same memory. So what changes from step to step is read from memory that stays
where it is, and Python runs only once. Random numbers come from generators that the graph knows.
"""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from sharding.rounds.failures import one_line
from train.config.sections import LocalConfig, OptimizerConfig
from train.registries import LOSSES, cross_entropy

log = logging.getLogger(__name__)

WARM_UP = 3  # eager steps before a capture, in which libraries choose kernels and allocate what they keep
FROM_ZERO = (SGD, Adam, AdamW, RMSprop)

Call = Callable[[], None]


class Generators:
    """One lane's generators of random numbers, on the host and on a GPU, as if it were alone."""

    def __init__(self, device: torch.device) -> None:
        self.host = torch.Generator()
        self.on_device = torch.Generator(device) if device.type == "cuda" else None

    def seed(self, seed: int) -> None:
        """Begin again, as `torch.manual_seed`."""
        self.host.manual_seed(seed)
        if self.on_device is not None:
            self.on_device.manual_seed(seed)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let torch draw these numbers inside the context, and its own again after it."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.host.get_state())
        device = None if self.on_device is None else _default_generator(self.on_device.device)
        own = None if device is None else device.graphsafe_get_state()
        try:
            if device is not None and self.on_device is not None:
                device.graphsafe_set_state(self.on_device.graphsafe_get_state())  # in common, not a copy
            yield
        finally:
            if device is not None and own is not None:
                device.graphsafe_set_state(own)
            self.host.set_state(torch.get_rng_state())
            torch.set_rng_state(before)

    def copy(self) -> "Generators":
        """Return generators that no graph knows, and that go on in the same way."""
        copied = Generators(torch.device("cpu") if self.on_device is None else self.on_device.device)
        copied.host.set_state(self.host.get_state())
        if self.on_device is not None and copied.on_device is not None:
            copied.on_device.set_state(self.on_device.get_state())
        return copied


def _default_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class CudaGraphs:
    """Captures the steps of one lane: on one stream, in one pool of memory, since only one of them runs at a time."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._stream, self._pool = stream, torch.cuda.graph_pool_handle()

    def __call__(self, step: Call, generators: Generators) -> Call:
        """Return what repeats a step. Nothing is computed yet."""
        graph = torch.cuda.CUDAGraph()
        assert generators.on_device is not None
        graph.register_generator_state(generators.on_device)
        with generators.current(), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            step()
        return graph.replay


class Capturing:
    """Whether the steps of a job are captured, if the device has graphs: until one cannot be, which is logged once."""

    def __init__(self, local: LocalConfig, available: bool) -> None:
        self.enabled = available
        if LOSSES[local.loss] is not cross_entropy:
            self.refuse(f"local.loss={local.loss} is not known to be fit for it")
        if local.checkpoint:
            self.refuse("local.checkpoint reads the state of the random numbers in the middle of a step")
        if not starts_at_zero(local.optimizer):
            self.refuse(f"the state of local.optimizer={local.optimizer.name} does not start at zero")

    def refuse(self, reason: str) -> None:
        """Let all steps be eager from now on."""
        if self.enabled:
            log.warning("Steps are not captured as CUDA graphs, and take several times longer: %s", reason)
        self.enabled = False


class Step:
    """A step on batches of one size: eager at first, then a graph.

    Args:
        function: takes the step, on tensors that stay where they are.
        model: the model that it trains.
        capture: makes a graph of it.
        capturing: whether steps are captured.
    """

    def __init__(self, function: Call, model: nn.Module, capture: "Capture | None", capturing: Capturing) -> None:
        self._function, self._model, self._capture, self._capturing = function, model, capture, capturing
        self._replay: Call | None = None
        self._taken = 0

    def take(self, generators: Generators) -> Generators:
        """Take the step with these random numbers; return those of the next one."""
        if not self._capturing.enabled or self._capture is None:
            with generators.current():
                self._function()
        elif self._taken < WARM_UP:
            self._watch(generators)
            self._taken += 1
        elif self._replay is not None:
            self._replay()
        else:
            spare = generators.copy()
            try:
                self._replay = self._capture(self._function, generators)
            except Exception as error:  # whatever a model or CUDA may raise
                with spare.current():  # the other may still wait for the end of the capture
                    self._function()  # raises where the client is the reason
                self._capturing.refuse(one_line(f"{type(error).__name__}: {error.__context__ or error}"))
                return spare
            self._replay()
        return generators

    def _watch(self, generators: Generators) -> None:
        """Take the step eagerly, and see whether a graph would repeat all of it."""
        places, host, other = _places(self._model), generators.host.get_state(), random.getstate()
        with generators.current():
            self._function()
        if _places(self._model) != places:
            self._capturing.refuse("the model puts other tensors in place of its buffers")
        on_host = generators.on_device is not None and not torch.equal(generators.host.get_state(), host)
        if on_host or random.getstate() != other:
            self._capturing.refuse("the model draws random numbers on the CPU")


Capture = Callable[[Call, Generators], Call]
CAPTURES: dict[str, Callable[[torch.cuda.Stream | None], Capture]] = {"cuda": CudaGraphs}  # by type of device


def starts_at_zero(optimizer: OptimizerConfig) -> bool:
    """Return whether an optimizer with a state of zeros steps as a new one, so that a lane's clients can share it."""
    options = optimizer.options
    known = optimizer.registry[optimizer.name] in FROM_ZERO
    return known and not options.get("dampening") and not options.get("differentiable")


def make_capturable(optimizer: Optimizer, device: torch.device) -> bool:
    """Let an optimizer keep its state and its learning rate on the device; return whether it never reads them there."""
    for group in optimizer.param_groups:
        group["lr"] = torch.full((), group["lr"], device=device)
        if "capturable" in group and device.type == "cuda":
            group["capturable"] = True
    return all(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def restart(optimizer: Optimizer, lr: float) -> None:
    """Make an optimizer, whose state starts at zero, as a new one with this learning rate, in the same memory."""
    state = [value for values in optimizer.state.values() for value in values.values()]
    if tensors := [value for value in state if isinstance(value, torch.Tensor)]:
        torch._foreach_zero_(tensors)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _places(model: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
