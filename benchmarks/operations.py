"""Count the operations that one step of a client dispatches: on a GPU each is a kernel or several, and few means fast.

Views and empty tensors do not count, since they compute nothing. A step is forward, backward, clip and decay, and the
optimizer; its operations do not depend on the batch's size. Prints JSON: for each model, in factors (r = 0.1) and
whole, the number of operations, and those that a step has most of.

    python benchmarks/operations.py [resnet18_gn] [cct_6_3x2] [gpt_tiny] [--precision bfloat16] [--device cuda]
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))  # `models` and `train` run from a checkout

from models import build_model
from sharding import ShardPlanner, client_model, clip_and_decay
from train.config.sections import LocalConfig
from train.data import Dataset, Split
from train.data.dataset import standardize, unchanged
from train.engines.local_training import make_optimizer, take_step

BATCH, MOST = 2, 8
FREE = ("empty", "_unsafe_view")  # in names of operations that compute nothing, besides views
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
# (inputs, classes) of the published settings; one number is the length of a text.
MODELS: Mapping[str, tuple[tuple[int, ...], int]] = {
    "resnet18_gn": ((3, 32, 32), 10),
    "cct_6_3x2": ((3, 32, 32), 100),
    "gpt_tiny": ((80,), 80),
}


class OperationCounter(TorchDispatchMode):
    """Counts the operations inside its context that compute something, by name.

    Attributes:
        counts: by name, as ``aten.mm``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count an operation and run it."""
        name = str(func.overloadpacket)
        is_free = func.is_view or torch.Tag.inplace_view in func.tags or any(part in name for part in FREE)
        self.counts[name] += not is_free
        return func(*args, **kwargs or {})


def count(name: str, strategy: str, local: LocalConfig, device: str = "cpu", **options: Any) -> Counter[str]:
    """Return the operations of a client's second step, by name; the first one makes the optimizer's state.

    Args:
        name: of the model.
        strategy: whose shard is trained, at r = 0.1.
        local: options of local training.
        device: of the model.
        options: of the model.
    """
    shape, classes = MODELS[name]
    torch.manual_seed(0)
    model = build_model(name, input_shape=shape, num_classes=classes, **options).to(device)
    shard = ShardPlanner(strategy).plan(model, {0: 0.1}).shard(0)
    small = client_model(model, shard).train()
    optimizer = make_optimizer(small, local, 0.1)
    optimizer.register_step_pre_hook(clip_and_decay(small, shard.clip, local.decay, local.decay_of))
    batch, dataset = make_batch(shape, classes, device)
    take_step(small, optimizer, batch.inputs, batch.targets, dataset, local)
    with OperationCounter() as counter:
        take_step(small, optimizer, batch.inputs, batch.targets, dataset, local)
    return +counter.counts


def make_batch(shape: tuple[int, ...], classes: int, device: str) -> tuple[Split, Dataset]:
    """Return a random batch of images or of texts, and its dataset."""
    is_text = len(shape) == 1
    inputs = torch.randint(classes if is_text else 256, (BATCH, *shape), dtype=torch.int64 if is_text else torch.uint8)
    targets = torch.randint(classes, (BATCH, *shape) if is_text else (BATCH,))
    batch = Split(inputs, targets).to(device)
    return batch, Dataset("random", batch, batch, classes, shape, unchanged if is_text else standardize)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"], help="of matrix products")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    args = parser.parse_args()
    if unknown := [name for name in args.models if name not in MODELS]:
        parser.error(f"unknown model {unknown[0]}; choose from {', '.join(MODELS)}")
    local = LocalConfig(optimizer=SGD, precision=args.precision)
    result: dict[str, Any] = {"torch": torch.__version__, "device": args.device, "precision": args.precision}
    for name in args.models or MODELS:
        for strategy in ("collective", "dense"):
            counts = count(name, strategy, local, args.device)
            result[f"{name}/{strategy}"] = {"operations": counts.total(), "most": dict(counts.most_common(MOST))}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
