"""Draws accuracy against bytes, `docs/pictures/result.svg`, from committed runs: python docs/pictures/result.py."""

import argparse
import os
import sys
from pathlib import Path

os.environ["MPLBACKEND"] = "agg"  # the picture goes to a file; a notebook's backend may not be installed here
sys.path.insert(0, str(Path(__file__).parents[2]))  # `train` runs from a checkout

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from train.report.frame import mean_curve
from train.report.text import mean_and_spread

RESULTS = Path(__file__).parents[2] / "results"
RUNS = {  # study, method in its curves.csv: label, its right end, color
    ("options", "low_rank, nesterov, lr 0.02"): ("sharding,\nour options", (1.5, 48.7), "#0072b2"),
    ("beyond", "narrow, equal bytes, nesterov"): ("narrow network,\nNesterov server", (3.4, 64), "#009e73"),
    ("beyond", "collective"): ("sharding,\npublished algorithm", (45, 23), "#d55e00"),
    ("beyond", "dense, nesterov, average"): ("dense FedAvg,\nour options", (55, 41), "0.2"),
}
Curve = tuple[np.ndarray, np.ndarray, str]  # gigabytes moved so far, accuracy in %, the last one with its deviation


def main() -> None:
    """Write the picture, legible at the width of a phone."""
    mpl.rcParams.update({"svg.hashsalt": "result", "font.family": "DejaVu Sans", "svg.fonttype": "none"})
    picture = Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = picture.add_subplot(
        xscale="log", xlim=(0.17, 60), ylim=(8, 77), xlabel="GB moved by all clients", ylabel="test accuracy, %"
    )
    for which, (label, position, color) in RUNS.items():
        gigabytes, accuracy, last = curve_of(*which)
        axes.plot(gigabytes, accuracy, color=color, linewidth=2)
        axes.plot(gigabytes[-1], accuracy[-1], "o", color=color)
        end = f"{label}\n{last} %, {gigabytes[-1]:.1f} GB"
        axes.text(*position, end, ha="right", color=color)
    axes.set_title("CIFAR-10, clients hold a tenth (dense FedAvg: all)", fontsize=10, loc="left")
    axes.set_xticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    axes.minorticks_off()
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


def curve_of(study: str, name: str) -> Curve:
    """Return the mean over the seeds of a study's method, and the last accuracy with its standard deviation."""
    curves = pd.read_csv(RESULTS / study / "curves.csv")
    curves = curves[curves.run.str.rpartition("-")[0] == name]
    mean = mean_curve(curves.assign(bytes_total=curves.bytes_up + curves.bytes_down), "test_accuracy", "bytes_total")
    last = mean_and_spread(100 * curves.groupby("run").test_accuracy.last())
    return mean.x.to_numpy() / 1e9, 100 * mean["mean"].to_numpy(), last


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
