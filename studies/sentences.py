"""A pretrained encoder of sentences that classifies texts, and 20 Newsgroups: parts of `studies/finetune.py`.

The encoder's last states are averaged over the tokens, as all-MiniLM-L6-v2 was trained for, and one linear layer
classifies the average.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models import LOADERS, MODELS
from sharding import UserError
from sharding.rng import generator
from train.data import DATASETS, Dataset, Split, default_root
from train.data.files import load_files


class SentenceClassifier(nn.Module):
    """An encoder of transformers with frozen embeddings, the mean of its last states, and a linear head.

    The head reads `scale` times the mean, and starts with weights that are as many times smaller. So its logits move as
    if the head's rate were `scale` times that of all else, in an optimizer like Adam, whose steps have one size.
    """

    def __init__(self, encoder: Any, num_classes: int, scale: float) -> None:
        super().__init__()
        self.encoder, self.scale = encoder, scale
        self.head = nn.Linear(encoder.config.hidden_size, num_classes)
        with torch.no_grad():
            self.head.weight.div_(scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (batch, length) to logits (batch, classes)."""
        mask = (ids != self.encoder.config.pad_token_id).long()
        states = self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        return self.head(self.scale * (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


def build_classifier(
    input_shape: tuple[int, ...], num_classes: int, *, weights: str | None = None, scale: float = 30.0
) -> SentenceClassifier:
    """Build it with random weights, of the architecture in a folder or on the Hugging Face hub."""
    from transformers import AutoConfig, AutoModel  # noqa: PLC0415 - an extra

    if weights is None:
        raise UserError("sentence_classifier needs weights=…, a folder or an id on the Hugging Face hub")

    encoder = AutoModel.from_config(AutoConfig.from_pretrained(weights), add_pooling_layer=False)
    for layer in encoder.modules():
        if isinstance(layer, nn.Embedding):
            layer.weight.requires_grad_(False)
    return SentenceClassifier(encoder, num_classes, scale)


def load_encoder(model: SentenceClassifier, weights: str) -> None:
    """Load the encoder's weights."""
    from transformers import AutoModel, logging  # noqa: PLC0415 - an extra

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    pretrained = AutoModel.from_pretrained(weights, add_pooling_layer=False, dtype=torch.float32)
    model.encoder.load_state_dict(pretrained.state_dict())


@cache
def load_newsgroups(
    *, root: str | Path | None = None, tokenizer: str | None = None, max_length: int = 32, test_samples: int = 600
) -> Dataset:
    """Load 20 Newsgroups from ``newsgroups20/{train,test}.parquet``, with random samples of its test set.

    Tokenizing takes as long as a round, so runs of one process share the texts.
    """
    folder = Path(root or default_root()) / "newsgroups20"
    dataset = load_files(
        train="train.parquet", test="test.parquet", root=folder, tokenizer=tokenizer, max_length=max_length
    )
    order = generator("newsgroups", "test").permutation(len(dataset.test))[:test_samples]
    rows = torch.from_numpy(order)
    test = Split(dataset.test.inputs[rows], dataset.test.targets[rows])
    return replace(dataset, name="newsgroups", test=test)


MODELS["sentence_classifier"] = build_classifier
LOADERS["sentence_classifier"] = f"{__name__}.load_encoder"
DATASETS["newsgroups"] = load_newsgroups
