"""Operations of one client's step: a proxy of the kernels that a GPU starts, which a CPU can count.

`python benchmarks/operations.py` counts what torch dispatches in one step of the three published models with r = 0.1:
forward, backward, hook and fused SGD, with V laid out as in the engines. Views cost nothing and are not counted. In
bfloat16 casts are added: of each factor and its gradient one, and of activations.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode

from models import build_model
from sharding import ShardPlanner, client_model, clip_and_decay
from sharding.layers.conv import lay_out_filters
from train.report.text import markdown_table

Batch = tuple[Tensor, Tensor]
IMAGES = {"input_shape": (3, 32, 32), "num_classes": 100}
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], Batch]]] = {
    "ResNet-18": ("resnet18_gn", IMAGES, lambda: (torch.randn(4, 3, 32, 32), torch.randint(100, (4,)))),
    "CCT": ("cct_6_3x2", IMAGES, lambda: (torch.randn(4, 3, 32, 32), torch.randint(100, (4,)))),
    "GPT": (
        "gpt_tiny",
        {"input_shape": (80,), "num_classes": 90},
        lambda: (torch.randint(90, (4, 80)), torch.randint(90, (4, 80))),
    ),
}


class Operations(TorchDispatchMode):
    """Count the operations that compute something, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func.namespace == "aten" and "_unsafe_view" not in str(func):
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def count(model: nn.Module, batch: Batch) -> dict[str, int]:
    """Return the operations of a client's step, and the casts that bfloat16 adds to them."""
    shard = ShardPlanner("collective").plan(model, {"phone": 0.1, "laptop": 0.1}, 0).shard("phone")
    client = lay_out_filters(client_model(model, shard)).train()
    optimizer = SGD(client.parameters(), lr=0.1, momentum=0.9, fused=True)
    optimizer.register_step_pre_hook(clip_and_decay(client, shard.clip))

    def passes(low: bool) -> Counter[str]:
        optimizer.zero_grad()
        with Operations() as operations, torch.autocast("cpu", torch.bfloat16, enabled=low):
            F.cross_entropy(client(batch[0]).flatten(0, -2), batch[1].flatten()).backward()
        return operations.counts

    passes(low=False)
    optimizer.step()  # makes the optimizer's state
    both = passes(low=False).total()
    with Operations() as step:
        optimizer.step()
    counts = {"forward and backward": both, "step": step.counts.total()}
    return counts | {"sum": sum(counts.values()), "casts in bfloat16": passes(low=True)["_to_copy.default"]}


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.manual_seed(0)
    rows = {name: count(build_model(kind, **sizes), make()) for name, (kind, sizes, make) in MODELS.items()}
    print(markdown_table(["model", *rows["GPT"]], ([name, *counts.values()] for name, counts in rows.items())))


if __name__ == "__main__":
    main()
