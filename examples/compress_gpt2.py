"""Compress a small GPT-2 to a budget of parameters, save, load and fine-tune it, and export an adapter.

Needs `pip install transformers`. Run it with: python examples/compress_gpt2.py [FOLDER]
"""

import sys
import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from sharding import (
    Budget,
    export_lora,
    factorize,
    freeze_except_factors,
    init_empty,
    load_factorized,
    merge,
    save_factorized,
)

CONFIG = GPT2Config(
    bos_token_id=0, eos_token_id=0, vocab_size=256, n_positions=64, n_embd=128, n_layer=3, n_head=4, use_cache=False
)
CONFIG.loss_type = "ForCausalLMLoss"


def make_model() -> nn.Module:
    """GPT-2, small, with random weights; take `GPT2LMHeadModel.from_pretrained("gpt2")` for the real one."""
    return GPT2LMHeadModel(CONFIG).eval()


def main(folder: Path) -> None:
    """Compress, save, load, tune and export the model."""
    torch.manual_seed(0)
    model, ids = make_model(), torch.randint(256, (2, 32))
    whole = sum(parameter.numel() for parameter in model.parameters())
    small = factorize(model, Budget(parameters=whole // 2), skip="lm_head")
    print(small.factorize_report)

    save_factorized(small, folder / "compressed")
    with init_empty():
        empty = make_model()
    loaded = load_factorized(folder / "compressed", empty).eval()
    assert torch.equal(loaded(ids).logits, small(ids).logits)
    size = sum(file.stat().st_size for file in (folder / "compressed").iterdir())
    print(f"saved and loaded: {size:,} bytes, {size / (4 * whole):.0%} of the dense model")

    start = deepcopy(loaded)
    optimizer = torch.optim.AdamW(freeze_except_factors(loaded).parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        loss = loaded(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
    export_lora(loaded, start, folder / "adapter")
    print(f"fine-tuned to loss {float(loss.detach()):.2f}; the change is an adapter for peft in {folder / 'adapter'}")

    merge(loaded).save_pretrained(folder / "merged")  # an ordinary checkpoint
    print(f"merged: {type(merge(loaded).transformer.h[0].mlp.c_fc).__name__} again, as transformers saves it")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
