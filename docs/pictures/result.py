"""Draws accuracy against bytes, `docs/pictures/result.svg`, from committed runs: python docs/pictures/result.py."""

import argparse
import csv
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

RESULTS = Path(__file__).parents[2] / "results"
RUNS = {  # study, method in its curves.csv: label, its right end, color
    ("options", "low_rank, nesterov, lr 0.02"): ("with our options", (4.2, 61), "#0072b2"),
    ("beyond", "collective"): ("as published", (1.7, 25), "#d55e00"),
    ("beyond", "dense, nesterov, average"): ("dense FedAvg,\nour options", (55, 43), "0.2"),
}
Curve = tuple[np.ndarray, np.ndarray]  # gigabytes moved so far, accuracy in %


def main() -> None:
    """Write the picture, legible at the width of a phone."""
    mpl.rcParams.update({"svg.hashsalt": "result", "font.family": "DejaVu Sans", "svg.fonttype": "none"})
    picture = Figure(figsize=(4.6, 4.2), layout="constrained")
    axes = picture.add_subplot(
        xscale="log", xlim=(0.2, 60), ylim=(8, 72), xlabel="GB moved by all clients", ylabel="test accuracy, %"
    )
    for which, (label, place, color) in RUNS.items():
        gigabytes, accuracy = mean_curve(*which)
        axes.plot(gigabytes, accuracy, color=color, linewidth=2)
        axes.plot(gigabytes[-1], accuracy[-1], "o", color=color)
        end = f"{label}\n{accuracy[-1]:.0f} %, {gigabytes[-1]:.1f} GB"
        axes.text(*place, end, ha="right", color=color)
    axes.set_title("CIFAR-10, each client holds a tenth of the terms", fontsize=10, loc="left")
    axes.set_xticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    axes.minorticks_off()
    axes.grid(color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    picture.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


def mean_curve(study: str, name: str) -> Curve:
    """Return the mean over the seeds of a study's method."""
    accuracies, moved = defaultdict(list), defaultdict(list)
    with (RESULTS / study / "curves.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["run"].rpartition("-")[0] == name:
                accuracies[int(row["rounds"])].append(100 * float(row["test_accuracy"]))
                moved[int(row["rounds"])].append((int(row["bytes_up"]) + int(row["bytes_down"])) / 1e9)
    return tuple(np.array([np.mean(values[rounds]) for rounds in sorted(values)]) for values in (moved, accuracies))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
