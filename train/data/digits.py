"""Handwritten digits that come with scikit-learn: 1,797 gray 8x8 images, no download.

Alpaydin & Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from train.data.dataset import EMPTY, Dataset, Split, standardize

DIGITS = Dataset("digits", EMPTY, EMPTY, num_classes=10, input_shape=(1, 8, 8), prepare=standardize)


def load_digits() -> Dataset:
    """Load the digits, which need no folder: 1,437 training and 360 test images, always the same ones.

    Sorted by class, every fifth image is for testing; so each class keeps its share to within one image.
    """
    package = find_spec("sklearn")  # found, not imported, which takes a second of a core
    if package is None or package.origin is None:
        raise ImportError("data=digits needs a package: pip install scikit-learn", name="sklearn")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    inks, labels = table[:, :-1], table[:, -1].astype(np.int64)
    inputs = torch.from_numpy(inks.reshape(-1, 1, 8, 8) * (255 / 16)).round().to(torch.uint8)  # 0…16 as published
    targets = torch.from_numpy(labels)
    by_class = np.argsort(labels, kind="stable")
    test = by_class[::5]
    train = np.setdiff1d(by_class, test)
    return replace(DIGITS, train=Split(inputs[train], targets[train]), test=Split(inputs[test], targets[test]))
