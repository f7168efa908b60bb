"""Activation checkpointing: what the blocks of a model compute is forgotten, and computed again in the backward pass.

Activations take most of a client's memory, and do not shrink with its terms. A factorized layer computes U Ω (V x), and
V x has few channels. So of each block its input is kept, and every product that is smaller than what it is computed
from, as V x is. The rest is computed again when the backward pass reaches the block: the product with U, norms and
activations. The gradients are the same to the bit, dropout included.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016 (arXiv 1604.06174).
"""

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.func import functional_call
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sharding.errors import UserError
from sharding.validation import typed

CONTAINERS = (nn.Sequential, nn.ModuleList)
_ATEN = torch.ops.aten


@typed
def checkpoint_blocks(model: nn.Module) -> nn.Module:
    """Let the blocks of a model be computed again in the backward pass, in place, and return the model.

    A block is a module with parts in an `nn.Sequential` or `nn.ModuleList`: a residual block, a layer of a transformer.
    This library knows the model's names as before; torch's have a part of their own for each block. An attribute
    `checkpoint_stem` of the model becomes True: it then computes again, itself, what comes before its blocks.

    Raises:
        UserError: the model has no blocks.
    """
    check_has_blocks(model)
    for container, name in [*_blocks(model)]:
        block = container.get_submodule(name)
        if not isinstance(block, CheckpointWrapper):
            setattr(container, name, checkpoint_wrapper(block, checkpoint_fn=_compute))
    if hasattr(model, "checkpoint_stem"):
        model.checkpoint_stem = True  # type: ignore[assignment]
    return model


def has_blocks(model: nn.Module) -> bool:
    """Whether a model has blocks for `checkpoint_blocks`."""
    return next(_blocks(model), None) is not None


def check_has_blocks(model: nn.Module) -> None:
    """Raise a UserError if a model has no blocks for `checkpoint_blocks`."""
    if not has_blocks(model):
        raise UserError(
            f"{type(model).__name__} has no blocks that could be computed again: no nn.Sequential or nn.ModuleList in "
            "it holds a module with parts; train it without checkpoint"
        )


def _blocks(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the container and the name of each outermost block."""
    for name, child in module._modules.items():
        if child is None:
            continue
        if isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS) and any(child.children()):
            yield module, name
        else:
            yield from _blocks(child)


def _compute(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute a block, and again in the backward pass with the buffers of the first time and without another effect.

    A batch norm would count a batch twice, and a spectral norm iterate twice. A cache of keys would have them twice: in
    training it has no use, so the block gets none.
    """
    if not torch.is_grad_enabled() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return block(*args, **kwargs)
    args = tuple(None if _is_cache(value) else value for value in args)
    kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    if torch.compiler.is_compiling():  # repeats no effect
        return checkpoint(block, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    buffers = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in block.named_buffers()}
    times = count()

    def forward(*values: Any) -> Any:
        inputs, named = values[: len(args)], dict(zip(kwargs, values[len(args) :], strict=True))
        if next(times):
            return functional_call(block, {name: value for name, (*_, value) in buffers.items()}, inputs, named)
        outputs = block(*inputs, **named)
        for name, buffer in block.named_buffers():
            was, version, _ = buffers.get(name, (None, None, None))
            if buffer.dim() > 1 and buffer is was and buffer._version == version:
                del buffers[name]  # a table, mask or frozen weight that it only read; batch norms count no version
        return outputs

    # All in order, since torch restores the random numbers of those devices only that have a tensor without a name.
    return checkpoint(forward, *args, *kwargs.values(), use_reentrant=False, context_fn=contexts)


def _is_cache(value: Any) -> bool:
    """Whether an argument is a cache of transformers, to which a block adds its keys."""
    return any(kind.__name__ == "Cache" for kind in type(value).__mro__)


def _policy(_: Any, operation: Any, *args: Any, **__: Any) -> CheckpointPolicy:
    """Keep a product that is smaller than what it is computed from; compute all else again."""
    smaller = False
    if operation is _ATEN.convolution.default:
        x, weight, transposed = args[0], args[1], args[6]
        smaller = not transposed and weight.shape[0] < x.shape[1]
    elif operation in (_ATEN.mm.default, _ATEN.addmm.default):
        rows, columns = args[-1].shape
        smaller = columns < rows
    return CheckpointPolicy.MUST_SAVE if smaller else CheckpointPolicy.PREFER_RECOMPUTE
