"""Count the memory of fine-tuning a pretrained model, by method, and compare it with processes that take two steps.

    python benchmarks/finetune_memory.py [--check minilm gpt2]

Counted are weights, gradients, the two states of AdamW in float32, and our shard as it was received. Activations come
on top and depend on the batch. All methods but `full` train terms or adapters of rank 16 in the same layers, and a new
head.

- `full`: all in float32.
- `lora`: the frozen model in bfloat16, adapters in float32.
- `qlora`: the same with the adapted layers in 4.127 bits: NF4 in groups of 64, scales quantized again (Dettmers et al.,
  NeurIPS 2023).
- `ours`: what `factorize(model, r, residual_format="int4")` and a round's shard leave to a client. Biases and norms
  train; embeddings and the output layer of a language model are frozen, in float32.

The models have the shapes of the published ones and no values. A check trains with random values on one sequence of 16
tokens. It counts the tensors of two steps, with activations, and takes the growth of processes: one whose allocator
returns what is freed, and one with glibc's defaults, which keep freed blocks. Writes
results/finetune_memory/memory.csv. Linux only, for checks.
"""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from measure import forget_peak, in_new_process, resident, save_rows
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # `models` and `train` run from a checkout

from client_memory import random_frozen
from scale import llama

from sharding import ShardPlanner, client_model, factorize, init_empty, shardable_layers
from sharding.modules.memory import release_freed_memory
from train.cli.client_memory import PeakMemory, random_shard

RANK = 16
QLORA_BITS = 4 + 8 / 64 + 32 / (64 * 256)
LENGTH = 16  # tokens of a check
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"  # blocks of this size are returned to the system as soon as they are freed


@dataclass(frozen=True)
class Memory:
    """Bytes.

    Attributes:
        frozen: weights that do not train.
        trained: weights that do.
        gradients: the gradients of the trained weights.
        states: the states of the optimizer.
        message: our shard as it was received, which a client keeps while it trains.
    """

    frozen: int
    trained: int
    gradients: int
    states: int
    message: int


def minilm(width: int = 384, depth: int = 6) -> nn.Module:
    """Return all-MiniLM-L6-v2 with a head for 20 classes."""
    from transformers import BertConfig, BertForSequenceClassification  # noqa: PLC0415

    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": depth}
    return BertForSequenceClassification(BertConfig(**shape, num_attention_heads=width // 32, num_labels=20))


def gpt2(width: int = 768, depth: int = 12) -> nn.Module:
    """Return GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415

    return GPT2LMHeadModel(GPT2Config(n_embd=width, n_layer=depth, n_head=width // 32, use_cache=False))


def vit_b() -> nn.Module:
    """Return ViT-B/16 with a head for 100 classes."""
    from timm import create_model  # noqa: PLC0415

    return create_model("vit_base_patch16_224", num_classes=100)


MODELS: dict[str, tuple[Callable[..., nn.Module], int, str]] = {  # with its width, and the name of a new head
    "minilm": (minilm, 384, "classifier"),
    "gpt2": (gpt2, 768, ""),
    "vit_b": (vit_b, 768, "head"),
    "decoder": (llama, 2048, ""),
}


def freeze_ends(model: nn.Module) -> nn.Module:
    """Freeze what `model: {name: transformers}` freezes: embeddings, and the output layer of a language model."""
    ends = [part for part in model.modules() if isinstance(part, nn.Embedding)]
    ends += [getattr(model, "lm_head", nn.Identity())]
    for end in ends:
        end.requires_grad_(False)
    return model


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def full(model: nn.Module, head: str, ratio: float) -> Memory:
    """Return the memory of training all of a model."""
    weights = 4 * size(model)
    return Memory(0, weights, weights, 2 * weights, 0)


def adapters(model: nn.Module, head: str, bits: float) -> Memory:
    """Return the memory of LoRA with the adapted layers in this many bits a number, all else in 16."""
    layers = shardable_layers(model)
    adapted = sum(layer.weight.numel() for layer in layers.values())
    new = size(model.get_submodule(head)) if head else 0
    rank = sum(RANK * (layer.weight.shape[0] + layer.weight.shape[1:].numel()) for layer in layers.values())
    frozen = adapted * bits / 8 + 2 * (size(model) - adapted - new)
    trained = 4 * (rank + new)
    return Memory(round(frozen), trained, trained, 2 * trained, 0)


def lora(model: nn.Module, head: str, ratio: float) -> Memory:
    return adapters(model, head, 16)


def qlora(model: nn.Module, head: str, ratio: float) -> Memory:
    return adapters(model, head, QLORA_BITS)


def ours(model: nn.Module, head: str, ratio: float) -> Memory:
    """Return the memory of a client of this library."""
    small, planner = factorize(freeze_ends(model), ratio, residual_format="int4"), ShardPlanner("top_n")
    frozen, shard = planner.frozen(small), planner.template(small, ratio)
    frozen = sum(part.nbytes for part in (*frozen.residuals.values(), *frozen.parameters.values()))
    trained = sum(part.nbytes for part in small.parameters() if part.requires_grad)
    return Memory(frozen, trained, trained, 2 * trained, shard.nbytes)


METHODS = {"full": full, "lora": lora, "qlora": qlora, "ours": ours}
CHECKED = ("full", "lora", "ours")  # quantized adapters need a GPU


def make_full(make: Callable[[], nn.Module], head: str, ratio: float) -> nn.Module:
    """Return the model to train."""
    return make()


def make_lora(make: Callable[[], nn.Module], head: str, ratio: float) -> nn.Module:
    """Return a model in bfloat16 with adapters in float32."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415

    torch.set_default_dtype(torch.bfloat16)
    model = make()
    torch.set_default_dtype(torch.float32)
    config = LoraConfig(r=RANK, target_modules=[*shardable_layers(model)], modules_to_save=[head] if head else None)
    adapted = get_peft_model(model, config)
    for part in adapted.parameters():
        if part.requires_grad:
            part.data = part.data.float()
    return adapted


def make_ours(make: Callable[[], nn.Module], head: str, ratio: float) -> nn.Module:
    """Return a client's model with random terms on a random residual; it keeps its shard."""
    with init_empty():
        structure = freeze_ends(make())
    small, planner = factorize(structure, ratio, residual_format="int4"), ShardPlanner("top_n")
    frozen = random_frozen(planner.frozen(small))
    template = planner.template(small, ratio)
    shard = random_shard(replace(template, frozen_digest=frozen.digest))
    model = client_model(structure, shard, frozen=frozen)
    model.received = shard
    return model


MAKERS = {"full": make_full, "lora": make_lora, "ours": make_ours}


def train(method: str, model: nn.Module) -> None:
    """Take two steps."""
    trained = [part for part in model.parameters() if part.requires_grad]
    optimizer, ids = torch.optim.AdamW(trained, lr=1e-4, fused=True), torch.arange(LENGTH)[None]
    with torch.autocast("cpu", torch.bfloat16, enabled=method == "lora"):
        for _ in range(2):
            optimizer.zero_grad()
            model(input_ids=ids).logits.float().square().mean().backward()
            optimizer.step()


def counted(method: str, name: str) -> int:
    """Return the bytes of gradients, states and activations at the peak of two steps."""
    make, width, head = MODELS[name]
    model = MAKERS[method](make, head, RANK / width)
    with PeakMemory() as peak:
        train(method, model)
    return peak.nbytes


def grown(method: str, name: str) -> int:
    """Return the bytes by which this process has grown at the peak of two steps."""
    make, width, head = MODELS[name]
    train(method, MAKERS[method](lambda: make(depth=1), head, RANK / width))  # loads code, and compiles kernels
    release_freed_memory()
    before = resident("VmRSS")
    model = MAKERS[method](make, head, RANK / width)
    forget_peak()  # of drawing random values
    train(method, model)
    return resident("VmHWM") - before


def check(method: str, name: str, static: int) -> list[int]:
    """Return the bytes of all tensors at the peak, and the growth of the two processes."""
    results = []
    for task, threshold in ((counted, None), (grown, "131072"), (grown, None)):
        os.environ.pop(THRESHOLD, None)
        if threshold:
            os.environ[THRESHOLD] = threshold
        results.append(in_new_process(task, method, name))
    return [static + results[0], *results[1:]]


def main() -> None:
    """Count, check, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", nargs="*", default=["minilm", "gpt2"], choices=["minilm", "gpt2"])
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for name, (make, width, head) in MODELS.items():
        for method, count in METHODS.items():
            with init_empty():
                model = make()
            memory, checks = count(model, head, RANK / width), ["", "", ""]
            if name in args.check and method in CHECKED:
                checks = check(method, name, memory.frozen + memory.trained + memory.message)
            named = zip(("with_activations", "process", "default_process"), checks, strict=True)
            rows.append({"model": name, "parameters": size(model), "method": method, **asdict(memory), **dict(named)})
            print(rows[-1], flush=True)
            save_rows(Path(__file__).parents[1] / "results" / "finetune_memory" / "memory.csv", rows)


if __name__ == "__main__":
    main()
