"""Draws one round, `docs/pictures/round.svg`: python docs/pictures/round.py."""

import argparse
from collections.abc import Container, Iterable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

TERMS = 8
COLORS = mpl.colormaps["viridis"]([0.02 + 0.12 * term for term in range(TERMS)])
CLIENTS = {"phone, r = ⅛": [0], "tablet, r = ¼": [1, 4], "laptop, r = ½": [0, 2, 3, 6]}


def main() -> None:
    """Write the picture."""
    mpl.rcParams.update({"svg.hashsalt": "round", "font.family": "DejaVu Sans", "svg.fonttype": "none"})
    picture = Figure(figsize=(9.6, 3.5))
    axes = picture.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 96), ylim=(0, 37))
    axes.axis("off")
    _matrix(axes, 3, 11, "server's layer W", "SVD: W = Σ λᵢ uᵢ vᵢᵀ")
    _terms(axes, 20, 13, range(TERMS), "terms, by λ")
    for place, (name, held) in enumerate(CLIENTS.items()):
        bottom = 25 - 11 * place
        _terms(axes, 53, bottom, held, name)
        _arrow(axes, (37, 17.5), (51, bottom + 3))
        _arrow(axes, (68, bottom + 3), (77, 17.5))
    axes.text(37, 27.5, "draw with\nprobability π", fontsize=8, color="0.35")
    axes.text(73.5, 27.5, "train U·Ω·Vᵀ", fontsize=8, color="0.35")
    drawn = {term for held in CLIENTS.values() for term in held}
    _terms(axes, 79, 13, range(TERMS), "average each vector\nover its holders", rise=10.2, colored=drawn)
    axes.text(79, 11.8, "gray: nobody drew it,\nit stays as it is", fontsize=8, va="top", color="0.35")
    picture.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})


def _matrix(axes: Axes, left: float, bottom: float, above: str, below: str) -> None:
    axes.add_patch(Rectangle((left, bottom), 12, 12, facecolor="0.88", edgecolor="0.3"))
    axes.text(left, bottom + 13, above, fontsize=9)
    axes.text(left, bottom - 1.2, below, fontsize=8, va="top", color="0.35")
    _arrow(axes, (left + 12.5, bottom + 6), (left + 16.5, bottom + 6))


def _terms(
    axes: Axes,
    left: float,
    bottom: float,
    held: Iterable[int],
    label: str,
    rise: float = 8.6,
    colored: Container[int] = range(TERMS),
) -> None:
    """Draw the held terms as bars of decreasing magnitude, those that are not `colored` in gray."""
    for term in held:
        color = COLORS[term] if term in colored else "0.8"
        axes.add_patch(Rectangle((left + 1.9 * term, bottom), 1.3, 7.5 - 0.6 * term, facecolor=color, edgecolor="none"))
    axes.text(left, bottom + rise, label, fontsize=9, va="baseline" if rise < 9 else "center")


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=10, color="0.4", linewidth=1))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
