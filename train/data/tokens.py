"""Turn texts into token ids: padded to one length for a class each, or packed in blocks to predict the next token."""

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.hub import reading
from sharding.errors import UserError, safe_repr
from train.data.dataset import Partition, Split

EXTRA = "pip install 'spectral-sharding[transformers]'"
IGNORED = -100  # target after the end of a block's text


class Tokenizer:
    """A tokenizer of `transformers`, with the id that fills a row.

    Args:
        name: folder or hub id.
        max_length: the length of a row of ids, at most.
        num_ids: the number of ids that the model can read, if it is known.
        pads_left: whether rows are padded on the left; by default, on the tokenizer's side.

    Raises:
        ImportError: `transformers` is missing.
        UserError: the tokenizer cannot be loaded, has no id for padding, or reads shorter rows only.
    """

    def __init__(self, name: str, max_length: int, num_ids: int | None = None, pads_left: bool | None = None) -> None:
        try:
            from transformers import AutoTokenizer  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise ImportError(f"data.tokenizer needs Hugging Face's transformers: {EXTRA} ({error})") from error
        with reading(name, f"data.tokenizer={safe_repr(name)}"):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        longest = self._tokenizer.model_max_length  # huge where it is not known
        if not 1 <= max_length <= longest:
            raise UserError(f"data.max_length={max_length} must be 1 to {longest}, which {safe_repr(name)} allows")
        pad, self._eos = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        if pad is None and self._eos is None:
            raise UserError(f"data.tokenizer={safe_repr(name)} has no padding token; add one to its special tokens")
        self.pad_token_id: int = self._eos if pad is None else pad
        self.max_length, self._num_ids = max_length, inf if num_ids is None else num_ids
        self._pads_left = self._tokenizer.padding_side == "left" if pads_left is None else pads_left

    def __len__(self) -> int:
        """Return the largest id and one: some ids may be left out."""
        return 1 + max(self._tokenizer.get_vocab().values())

    def padded(self, texts: Sequence[str]) -> Tensor:
        """Return ids, cut and padded: int64 (texts, max_length); raise a UserError if the model does not know one."""
        ids = self._encode(texts, truncation=True, max_length=self.max_length)
        rows = np.full((len(ids), self.max_length), self.pad_token_id)
        for row, text in zip(rows, ids, strict=True):
            row[self.max_length - len(text) if self._pads_left else 0 :][: len(text)] = text
        return torch.from_numpy(rows)

    def packed(self, texts: Sequence[str], clients: Partition) -> tuple[Split, Partition]:
        """Join each client's texts, with an end of text after each, and cut them in blocks of `max_length`.

        Every token but a client's first is predicted once. The last block of a client is padded, with targets that
        `IGNORED` says to ignore. Return the blocks, client after client, and the indices of each client's; raise a
        UserError if the model does not know an id.
        """
        ids = self._encode(texts)
        if self._eos is not None:
            for text in ids:
                if text[-1:] != [self._eos]:
                    text.append(self._eos)
        blocks = [_blocks([ids[index] for index in part], self.max_length, self.pad_token_id) for part in clients]
        inputs, targets = (torch.from_numpy(np.concatenate(part)) for part in zip(*blocks, strict=True))
        ends = np.cumsum([len(part) for part, _ in blocks])
        return Split(inputs, targets), np.split(np.arange(ends[-1]), ends[:-1])

    def _encode(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(
            list(texts), padding=False, return_attention_mask=False, verbose=False, **options
        )["input_ids"]
        largest = [max((self.pad_token_id, *text)) for text in ids]
        if unknown := [row for row, id in enumerate(largest) if id >= self._num_ids]:
            token = self._tokenizer.convert_ids_to_tokens(largest[unknown[0]])
            raise UserError(
                f"the tokenizer has {len(self)} ids and the model {self._num_ids}: {safe_repr(token)} of text "
                f"{unknown[0] + 1} or its padding is none of the model's; name the model's own tokenizer, or save the "
                "model again after model.resize_token_embeddings"
            )
        return ids


def _blocks(texts: Sequence[Sequence[int]], length: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets, int64 (blocks, length): the tokens of all texts, and those that follow them."""
    stream = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
    size = len(stream) - 1
    rows = -(-size // length)
    inputs, targets = np.full(rows * length, pad), np.full(rows * length, IGNORED)
    inputs[:size], targets[:size] = stream[:-1], stream[1:]
    return inputs.reshape(rows, length), targets.reshape(rows, length)
