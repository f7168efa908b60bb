"""A pretrained text encoder, too small to be one, in the files of transformers; and tables of texts to tune it on."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

WORDS = {"space": ("orbit", "moon", "rocket"), "sport": ("goal", "cup", "coach")}


def write_encoder(folder: Path, words: Iterable[str]) -> str:
    """Write a BERT without a head, and a tokenizer that knows these words, to a new folder; return the folder."""
    transformers = pytest.importorskip("transformers")
    known = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*words})]
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(known))
    transformers.BertTokenizer(str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(known), max_position_embeddings=64, **sizes)
    transformers.BertModel(config).save_pretrained(folder)
    return str(folder)


def write_table(path: Path, labels: Sequence[str], count: int = 40) -> None:
    """Write rows with the columns `text` and `label`, of these labels in turn."""
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for number in range(count):
            label = labels[number % len(labels)]
            rows.writerow([" ".join(WORDS.get(label, ("what",))[number % 3 :]), label])
