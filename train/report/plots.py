"""The style of all pictures: a color for each strategy, and the mean over seeds in a band of ± one deviation.

The colors are those of Okabe & Ito and of Paul Tol, which the color-blind can distinguish. Dashes and markers
distinguish lines of one color, also in black and white.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import ceil
from pathlib import Path
from textwrap import fill
from typing import Any, Literal
from zlib import crc32

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

Dash = str | tuple[int, tuple[float, ...]]

DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.", (0, (9, 3)), (0, (4, 1, 1, 1, 1, 1)), (0, (1, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
OKABE_ITO = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7")
RC_PARAMS: Any = {
    "svg.hashsalt": "spectral-sharding",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
RC_PARAMS["text.parse_math"] = False  # names may contain dollar signs

LABELS = {
    "rounds": "rounds",
    "bytes_total": "bytes moved by all clients, down and up (MB)",
    "simulated_total": "simulated seconds",
    "test_accuracy": "test accuracy (%)",
    "train_loss": "clients' training loss",
    "train_set_loss": "loss on the training set",
    "train_set_accuracy": "accuracy on the training set (%)",
    "anme": "ANME (1 even, 0 certain)",
    "epsilon": "ε of one client's differential privacy",
    "alignment": "cosine with FedAvg's update",
    "coverage": "share of the terms that some client holds",
    "discrepancy": "squared error of the average, of ‖W‖²",
}


@dataclass(frozen=True)
class Style:
    """How a line is drawn."""

    color: str
    dash: Dash = "-"
    marker: str = "o"

    def line(self, points: int) -> dict[str, Any]:
        """Return matplotlib's options for a line with this many points; about eight of them get a marker."""
        step = max(1, points // 8)
        start = MARKERS.index(self.marker) * step // len(MARKERS)  # so that lines that coincide show all their markers
        mark = {"marker": self.marker, "markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.6}
        return {"color": self.color, "linestyle": self.dash, "linewidth": 1.6, "markevery": (start, step)} | mark


STYLES = {
    "top_n": Style("#E69F00", "-", "s"),
    "top_n_scaled": Style("#E69F00", "--", "s"),
    "prism": Style("#56B4E9", "-", "^"),
    "prism_scaled": Style("#56B4E9", "--", "^"),
    "prism_wallenius": Style("#332288", "--", "v"),
    "prism_wallenius_clip": Style("#332288", "-", "v"),
    "unbiased": Style("#D55E00", "-", "D"),
    "collective": Style("#0072B2", "-", "o"),
    "schatten": Style("#CC79A7", "-", "X"),
    "full": Style("#777777", "--", "*"),
    "dense": Style("#000000", "--", "*"),
}
OTHERS = ("#882255", "#999933", "#AA4499", "#44AA99", "#661100", "#6699CC")


def style_of(strategy: str) -> Style:
    """Return the style of a strategy, the same in all pictures; a custom strategy gets a color by its name."""
    return STYLES.get(strategy) or Style(OTHERS[crc32(strategy.encode()) % len(OTHERS)], "-", "D")


def styles_of(names: Iterable[str]) -> dict[str, Style]:
    """Return styles for lines that are not strategies, in their order: colors first, then dashes."""
    colors = list(dict.fromkeys(style.color for style in STYLES.values()))
    return {
        name: Style(colors[i % len(colors)], DASHES[i // len(colors) % len(DASHES)], MARKERS[i % len(MARKERS)])
        for i, name in enumerate(names)
    }


def displayed(values: pd.Series, metric: str) -> pd.Series:
    """Return a metric in the unit of its axis: shares in %, bytes in MB."""
    return values * (100 if metric.endswith("accuracy") else 1e-6 if metric == "bytes_total" else 1)


def draw_band(axes: Axes, curve: pd.DataFrame, style: Style, label: str, x: str, y: str) -> None:
    """Draw the mean of a `mean_curve` of the metric `y` over `x`, and ± one standard deviation around it."""
    if curve.empty:
        return
    xs, (mean, deviation) = displayed(curve.x, x), (displayed(curve[name], y) for name in ("mean", "deviation"))
    axes.plot(xs, mean, **style.line(len(xs)), label=label)
    if deviation.any():
        axes.fill_between(xs, mean - deviation, mean + deviation, color=style.color, alpha=0.15, linewidth=0)


def draw_targets(axes: Axes, targets: Sequence[float]) -> None:
    """Mark target accuracies, shares, and name them at the right edge, beside the curves."""
    percents = [100 * target for target in targets]
    for percent in percents:
        axes.axhline(percent, color="0.4", linewidth=0.9, linestyle=(0, (1, 2)))
    if percents:
        right = axes.secondary_yaxis("right")
        right.set_yticks(percents, [f"{percent:g} %" for percent in percents])
        right.tick_params(length=0, labelsize=9, labelcolor="0.3")
        right.spines["right"].set_visible(False)


def lay_out(axes: Axes, x: str, y: str, title: str = "") -> None:
    """Label the axes as in `LABELS`; rounds are whole numbers, and the axis of bytes is logarithmic."""
    axes.set(xlabel=LABELS.get(x, x), ylabel=LABELS.get(y, y))
    if title:
        axes.set_title(title, loc="left")
    if x == "bytes_total":
        lay_out_log(axes, "x")
    if x == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)


def lay_out_log(axes: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic, with plain numbers at 1, 2 and 5 of each decade; do nothing if all values are 0."""
    if axes.lines and (axes.dataLim.xmax if which == "x" else axes.dataLim.ymax) <= 0:
        return
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def draw_curves(
    axes: Axes,
    curves: Mapping[str, pd.DataFrame],
    styles: Mapping[str, Style],
    x: str,
    y: str,
    title: str = "",
    targets: Sequence[float] = (),
) -> None:
    """Draw a metric of several groups, each a `mean_curve` of its seeds, over a cost.

    Curves and styles are by the group's label; `x` and `y` are keys of `LABELS`, `y` may be another metric; target
    accuracies are marked.
    """
    for label, curve in curves.items():
        draw_band(axes, curve, styles[label], label, x, y)
    draw_targets(axes, targets)
    lay_out(axes, x, y, title)
    if y == "test_accuracy" and max((curve.runs.max() for curve in curves.values() if len(curve)), default=1) > 1:
        axes.set_ylabel(LABELS[y] + ", mean ± sd of seeds")


def curve_figure(
    curves: Mapping[str, pd.DataFrame],
    styles: Mapping[str, Style],
    x: str,
    y: str,
    title: str,
    targets: Sequence[float] = (),
) -> Figure:
    """Return a picture of one panel that `draw_curves` fills, without a legend."""
    figure, axes = new_figure()
    draw_curves(axes, curves, styles, x, y, title, targets)
    return figure


def new_figure(height: float = 3.5) -> tuple[Figure, Axes]:
    """Return a picture with one panel, small enough to be read on a phone."""
    with mpl.rc_context(RC_PARAMS):
        figure = Figure(figsize=(4.2, height), layout="constrained")
        return figure, figure.subplots()


def add_legend(figure: Figure, axes: Axes) -> None:
    """Put the legend below the axes; beyond two lines it makes the picture higher."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        labels = [fill(label, 44) for label in labels]  # fits into the width of a picture
        columns = max(1, min(3, int(13 * figure.get_figwidth() / (max(map(len, labels)) + 8))))  # 13 letters an inch
        lines = ceil(sum(label.count("\n") + 1 for label in labels) / columns)
        figure.set_figheight(figure.get_figheight() + 0.2 * max(0, lines - 2))
        location: Any = {"loc": "outside lower center", "ncols": columns, "frameon": False}
        with mpl.rc_context(RC_PARAMS):
            figure.legend(handles, labels, **location, fontsize=9, handlelength=3.2)


def svg_of(figure: Figure) -> bytes:
    """Return the picture as SVG, with the same bytes each time."""
    buffer = BytesIO()
    with mpl.rc_context(RC_PARAMS):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return buffer.getvalue()


def save(figure: Figure, path: Path) -> list[Path]:
    """Write the picture as PNG and, for papers, as SVG beside it; return both paths."""
    vector = path.with_suffix(".svg")
    figure.savefig(path, dpi=150)
    vector.write_bytes(svg_of(figure))
    return [path, vector]
