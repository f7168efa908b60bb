"""Time factorized models of ten published architectures against the dense ones.

Ratios of processor time on one thread, of a forward pass without gradients and of a forward and backward pass; beside
them the ratio of multiply-adds of a forward pass. Dense and factorized models take turns, and each is the best of many
passes, so other load on the machine affects neither. Weights are random, widths are those published; most models have
fewer layers, which are alike.

    python benchmarks/architectures.py [results/architectures/ratios.json] [--seconds 2] [--only t5]

`unet` needs diffusers.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))  # this checkout's own library

import timm
import torch
import transformers as hf
from library import in_turns
from measure import save
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from sharding import factorize

Case = tuple[nn.Module, dict[str, Any]]
RATIOS = (0.1, 0.25)
IMAGE = {"x": torch.randn(2, 3, 224, 224)}


def ids(*shape: int) -> Tensor:
    """Return token ids of this shape."""
    return torch.randint(3, 100, shape)


MODELS: dict[str, Callable[[], Case]] = {
    "t5": lambda: (
        hf.T5EncoderModel(hf.T5Config(d_model=512, d_ff=2048, d_kv=64, num_layers=3, num_heads=8)),
        {"input_ids": ids(1, 16)},
    ),
    "bert": lambda: (hf.BertModel(hf.BertConfig(num_hidden_layers=3)), {"input_ids": ids(4, 64)}),
    "gpt2": lambda: (hf.GPT2Model(hf.GPT2Config(n_layer=3, use_cache=False)), {"input_ids": ids(4, 64)}),
    "vit": lambda: (timm.create_model("vit_small_patch16_224", depth=3), IMAGE),
    "resnet": lambda: (timm.create_model("resnet50"), IMAGE),
    "convnext": lambda: (timm.create_model("convnext_tiny"), IMAGE),
    "unet": lambda: (
        import_module("diffusers").UNet2DModel(
            sample_size=32, block_out_channels=(128, 256, 256, 256), layers_per_block=1
        ),
        {"sample": torch.randn(2, 3, 32, 32), "timestep": torch.tensor([1, 2])},
    ),
    "whisper": lambda: (
        hf.WhisperModel(
            hf.WhisperConfig(encoder_layers=2, decoder_layers=2, max_source_positions=200, use_cache=False)
        ),
        {"input_features": torch.randn(1, 80, 400), "decoder_input_ids": ids(1, 32)},
    ),
    "mamba": lambda: (hf.MambaModel(hf.MambaConfig(num_hidden_layers=3, use_cache=False)), {"input_ids": ids(2, 32)}),
    "moe": lambda: (
        hf.MixtralModel(
            hf.MixtralConfig(
                vocab_size=1000, hidden_size=1024, intermediate_size=3584, num_hidden_layers=2, use_cache=False
            )
        ),
        {"input_ids": ids(2, 64)},
    ),
}


def compare(name: str, seconds: float) -> dict[str, object]:
    """Compare a dense model and factorized ones, for this many seconds each."""
    torch.manual_seed(0)
    dense, inputs = MODELS[name]()
    models = {"dense": dense.eval()} | {f"{ratio}": factorize(dense, ratio).eval() for ratio in RATIOS}
    counts = {name: multiply_adds(model, inputs) for name, model in models.items()}
    forward = in_turns({name: forward_pass(model, inputs) for name, model in models.items()}, seconds)
    step = in_turns({name: training_pass(model, inputs) for name, model in models.items()}, seconds)
    return {
        "coverage": models[f"{RATIOS[0]}"].factorize_report.coverage,
        "dense_ms": {"forward": 1e3 * forward["dense"], "step": 1e3 * step["dense"]},
    } | {
        f"{ratio}": {
            "multiply_adds": counts[f"{ratio}"] / counts["dense"],
            "forward": forward[f"{ratio}"] / forward["dense"],
            "step": step[f"{ratio}"] / step["dense"],
        }
        for ratio in RATIOS
    }


@torch.no_grad()
def multiply_adds(model: nn.Module, inputs: dict[str, Any]) -> int:
    """Return the multiply-adds of a forward pass."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: experts_flops}) as counter:
        model(**inputs)
    return counter.get_total_flops() // 2


def experts_flops(rows: Sequence[int], experts: Sequence[int], *_: object, **__: object) -> int:
    """Return the operations of a product of rows (n, in) with the experts (count, in, out); torch counts none."""
    return 2 * rows[0] * experts[1] * experts[2]


def forward_pass(model: nn.Module, inputs: dict[str, Any]) -> Callable[[], object]:
    """Return a forward pass without gradients."""

    def run() -> None:
        with torch.no_grad():
            model(**inputs)

    return run


def training_pass(model: nn.Module, inputs: dict[str, Any]) -> Callable[[], object]:
    """Return a forward and backward pass."""

    def run() -> None:
        model.zero_grad()
        outputs = [part for part in tree_leaves(model(**inputs)) if isinstance(part, Tensor) and part.requires_grad]
        outputs[0].sum().backward()

    return run


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("into", type=Path, nargs="?", help="file to write, as JSON")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each model and pass (default: 2)")
    parser.add_argument("--only", choices=MODELS, nargs="+", default=list(MODELS))
    args = parser.parse_args()
    if "unet" in args.only and find_spec("diffusers") is None:
        parser.error("unet needs a package: pip install diffusers, or choose others with --only")
    torch.set_num_threads(1)
    results = {"torch": torch.__version__, "threads": 1} | {name: compare(name, args.seconds) for name in args.only}
    print(json.dumps(results, indent=1))
    if args.into:
        save(args.into, results)
