"""Draws one round, `docs/pictures/round.svg`: python docs/pictures/round.py."""

import argparse
import os
from collections.abc import Container, Iterable
from pathlib import Path

os.environ["MPLBACKEND"] = "agg"  # the picture goes to a file; a notebook's backend may not be installed here

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

TERMS = 8
COLORS = mpl.colormaps["viridis"]([0.02 + 0.12 * term for term in range(TERMS)])
CLIENTS = {"phone, r = ⅛": [0], "tablet, r = ¼": [1, 4], "laptop, r = ½": [0, 2, 3, 6]}
MIDDLE = 15.5  # left edge of what stands in the middle


def main() -> None:
    """Write the picture, legible at the width of a phone."""
    mpl.rcParams.update({"svg.hashsalt": "round", "font.family": "DejaVu Sans", "svg.fonttype": "none"})
    picture = Figure(figsize=(4.6, 4.2))
    axes = picture.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 46), ylim=(0, 42))
    axes.axis("off")
    axes.text(1, 39.6, "1. The server decomposes a layer, W = Σ λᵢuᵢvᵢᵀ", fontsize=10)
    _terms(axes, MIDDLE, 30.5, range(TERMS))
    axes.text(1, 25.6, "2. Each client trains the terms drawn for it", fontsize=10)
    for column, (name, terms) in enumerate(CLIENTS.items()):
        left = 1 + 15.3 * column
        _arrow(axes, (23, 30), (left + 7, 27.6))
        _terms(axes, left, 17, terms)
        axes.text(left, 14.9, name, fontsize=10)
        _arrow(axes, (left + 7, 14.2), (23, 11.6))
    _terms(axes, MIDDLE, 3.4, range(TERMS), colored={term for terms in CLIENTS.values() for term in terms})
    axes.text(1, 1, "3. It averages each vector over its holders", fontsize=10)
    axes.text(32, 5.2, "gray: not drawn,\nunchanged", fontsize=9, color="0.35")
    picture.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


def _terms(
    axes: Axes, left: float, bottom: float, terms: Iterable[int], colored: Container[int] = range(TERMS)
) -> None:
    """Draw the held terms as bars of decreasing magnitude, those that are not `colored` in gray."""
    for term in terms:
        color = COLORS[term] if term in colored else "0.8"
        axes.bar(left + 1.9 * term, 7.5 - 0.6 * term, 1.3, bottom, align="edge", color=color)


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color="0.5", linewidth=1))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
