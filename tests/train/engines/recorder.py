"""A graph on a CPU: it repeats the operations of one step on the same memory, as a CUDA graph repeats its kernels.

Python runs once, when the step is recorded, and nothing may read a value then. So a step whose numbers, shapes or
memory change from client to client gives wrong results here, as it would on a GPU.
"""

from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from sharding.rounds.optim import StepHook

READING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Recorder:
    """Records steps, in place of `train.engines.capture.CudaGraphs`."""

    replays = 0

    def __init__(self, stream):
        assert stream is None

    def __call__(self, step, draws):
        recording = _Recording()
        try:
            with draws.copy().current(), as_if_captured(), recording:
                step()
        finally:
            recording.undo()

        def replay():
            Recorder.replays += 1
            with draws.current(), torch.no_grad():
                recording.repeat()

        return replay


class _Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.operations, self.made, self.before = [], set(), {}

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function in READING:
            raise RuntimeError(f"{function} reads a value while the step is recorded")
        options = options or {}
        for tensor in tensors_in((arguments, options)):
            storage = tensor.untyped_storage()
            if place(tensor) not in self.made and place(tensor) not in self.before:
                self.before[place(tensor)] = storage, storage.clone()
        result = function(*arguments, **options)
        self.made |= {place(tensor) for tensor in tensors_in(result)} - self.before.keys()
        if torch.Tag.inplace_view not in function.tags:  # it computes nothing
            self.operations.append((function, *tree_map(alias, (arguments, options, result))))
        return result

    def undo(self):
        """Give everything that was there before the step its values back: a capture computes nothing."""
        for storage, values in self.before.values():
            storage.copy_(values)

    def repeat(self):
        for function, arguments, options, result in self.operations:
            again = function(*arguments, **options)
            for old, new in zip(tensors_in(result), tensors_in(again), strict=True):
                if place(old) != place(new):  # neither a view nor in place
                    old.copy_(new)


def as_if_captured():
    """Let the hook that clips know that it cannot compare multipliers, as while a GPU captures."""
    return patch.object(StepHook, "_is_clipping", lambda self: self._clip is not None)


def tensors_in(values):
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def alias(value):
    """Return the same memory in its present shape, which an operation in place may change later."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def place(tensor):
    return tensor.untyped_storage().data_ptr()
