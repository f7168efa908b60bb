"""Hold out training samples, for tuning without the test set."""

from dataclasses import replace

import numpy as np
import torch

from sharding.errors import UserError
from sharding.rng import generator
from train.data.dataset import Dataset, Split


def hold_out(dataset: Dataset, count: int, seed: int) -> Dataset:
    """Return the dataset with `count` random samples of its training split in place of the test split.

    No client has them. Natural clients keep at least one sample, their first.

    Args:
        dataset: as it was loaded.
        count: of samples, at least 1.
        seed: decides which.

    Raises:
        UserError: that would leave nothing to train on.
    """
    natural = dataset.natural
    free = np.ones(len(dataset.train), dtype=bool)
    free[[0] if natural is None else [part[0] for part in natural]] = False
    if count > free.sum():
        raise UserError(
            f"data.holdout={count} must be at most {free.sum()}, so that all clients of {dataset.name} train"
        )
    held = np.zeros(len(free), dtype=bool)
    held[generator(seed, "holdout").choice(np.flatnonzero(free), count, replace=False)] = True
    place = np.cumsum(~held) - 1  # of a sample that stays, among those that stay
    if natural is not None:
        natural = [place[part[~held[part]]] for part in natural]
    remark = f"tested on {count:,} training samples kept from the clients"
    return replace(
        dataset,
        train=_rows(dataset.train, ~held),
        test=_rows(dataset.train, held),
        natural=natural,
        remarks=(*dataset.remarks, remark),
    )


def _rows(split: Split, chosen: np.ndarray) -> Split:
    rows = torch.from_numpy(np.flatnonzero(chosen)).to(split.targets.device)
    return Split(split.inputs[rows], split.targets[rows])
