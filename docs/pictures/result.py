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

from train.report.frame import find_runs, mean_curve
from train.report.text import mean_and_spread

RESULTS = Path(__file__).parents[2] / "results"
RUNS = {  # study, method in it: label, its right end, color
    ("narrow_tenth", "r = 0.1 for all, lr 0.02"): ("sharding,\nour options", (1.75, 50), "#0072b2"),
    ("narrow_tenth", "narrow, equal bytes, lr 0.03"): ("narrow network,\nour options", (14, 60), "#009e73"),
    ("shortcuts/timm_whole", "collective"): ("sharding,\npublished algorithm", (50, 24), "#d55e00"),
    ("beyond", "dense, nesterov, average"): ("dense FedAvg,\nour options", (55, 39), "0.2"),
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
    file = RESULTS / study / "curves.csv"  # or the folders of the runs
    curves = pd.read_csv(file) if file.exists() else find_runs((RESULTS / study).glob(f"{name}-*"))[0].rounds
    curves = curves[curves.run.str.rpartition("/")[2].str.rpartition("-")[0] == name]
    mean = mean_curve(curves.assign(bytes_total=bytes_of(curves)), "test_accuracy", "bytes_total")
    last = mean_and_spread(100 * curves.groupby("run").test_accuracy.last())
    return mean.x.to_numpy() / 1e9, 100 * mean["mean"].to_numpy(), last


def bytes_of(curves: pd.DataFrame) -> pd.Series:
    """Return the bytes so far, which a study's table has by their direction."""
    return curves.bytes_total if "bytes_total" in curves else curves.bytes_up + curves.bytes_down


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
