"""The paper's CIFAR-10 column (ResNet-18, r = 0.1, 1,000 rounds) on a GPU: what the CPU stand-ins cannot show.

Runs what is missing, in this order, one run after the other, and writes `table1.md` with the published column beside
it, as `python -m train table 1 --scale paper` does. A run that was cut off goes on from its last checkpoint.

    python benchmarks/gpu.py [results/gpu] [KEY=VALUE …]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # `train` runs from a checkout

from train.__main__ import main as train

ORDER = (
    *("collective", "top_n", "unbiased", "prism_wallenius_clip", "prism", "dense", "full"),  # what is asked first
    *("prism_wallenius", "prism_scaled", "top_n_scaled"),
)
WHOLE = ("dense", "full")  # the same run at any keep ratio


def main(words: Sequence[str]) -> int:
    """Run the column; words are a folder, and overrides for every run."""
    overrides = [word for word in words if "=" in word]
    into, *_ = [word for word in words if "=" not in word] + ["results/gpu"]
    cells = [f"cifar10_resnet18/{'whole' if name in WHOLE else 'r0.1'}/{name}-0" for name in ORDER]
    options = ["--scale", "paper", "--seeds", "0", "--jobs", "1", "--output", into, "--only", ",".join(cells)]
    return train(["table", "1", *options, *overrides])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
