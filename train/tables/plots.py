"""The pictures of tables and figures."""

from collections.abc import Callable, Sequence
from math import ceil
from statistics import fmean, stdev
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from train.report.history import History
from train.report.plots import LABELS, draw_curves, style_of
from train.tables.layout import Layout, Matrix, Panel, Setting

Runs = Callable[[Setting, str], Sequence[History]]  # of a setting and a strategy


def draw_table(matrix: Matrix, settings: Sequence[Setting], runs: Runs, layout: Layout) -> Picture:
    """Draw one panel per setting: our values as dots with deviations, the published ones hollow."""
    columns = min(len(settings), 3)
    rows = ceil(len(settings) / columns)
    size = (4.2 * columns + 1, (0.28 * len(matrix.strategies) + 1.2) * rows + 0.4)
    picture = Picture(figsize=size, layout="constrained")
    panels = picture.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axes in panels[len(settings) :]:
        axes.set_visible(False)
    for axes, setting in zip(panels, settings, strict=False):
        _draw_setting(axes, matrix, setting, runs, layout)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return picture


def _draw_setting(axes: Axes, matrix: Matrix, setting: Setting, runs: Runs, layout: Layout) -> None:
    labels = {"ours": "ours", "published": "published (its own scale)"}
    for place, strategy in enumerate(matrix.strategies):
        ours = [run.accuracies[-1] for run in runs(setting, strategy) if run.is_finished and run.accuracies]
        look: dict[str, Any]
        if ours:
            look = {"color": style_of(strategy).color, "label": labels.pop("ours", None)}
            axes.errorbar(fmean(ours), place, xerr=stdev(ours) if len(ours) > 1 else None, fmt="o", **look)
        if known := layout.published_of(setting, strategy):
            look = {"color": "0.55", "markerfacecolor": "none", "label": labels.pop("published", None)}
            axes.errorbar(known[0], place, xerr=known[1] if len(known) > 1 else None, fmt="D", **look)
    axes.set_yticks(range(len(matrix.strategies)), matrix.strategies)
    axes.set_title(_title(setting, layout), fontsize=9)
    axes.set_xlabel(LABELS["test_accuracy"])
    axes.grid(alpha=0.3)


def draw_rows(
    matrix: Matrix, settings: Sequence[Setting], runs: Runs, layout: Layout, panels: Sequence[Panel]
) -> Picture:
    """Draw one row of panels per setting, with one color per strategy and the seeds' mean in a band."""
    picture = Picture(figsize=(4.6 * len(panels) + 2, 3.0 * len(settings) + 0.2), layout="constrained")
    styles = {strategy: style_of(strategy) for strategy in matrix.strategies}
    handles: dict[str, Artist] = {}
    for row, setting in zip(picture.subplots(len(settings), len(panels), squeeze=False), settings, strict=True):
        for axes, panel in zip(row, panels, strict=True):
            curves = {
                strategy: [run.curve(panel.y, panel.x, panel.smooth) for run in runs(setting, strategy)]
                for strategy in matrix.strategies
            }
            draw_curves(axes, curves, styles, panel.x, panel.y)
            if panel.smooth:
                axes.set_ylabel(f"{LABELS.get(panel.y, panel.y)}\nmoving average {panel.smooth:g}")
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        row[0].set_title(_title(setting, layout), fontsize=9, loc="left")
    picture.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False)
    return picture


def _title(setting: Setting, layout: Layout) -> str:
    return f"{layout.experiments[setting.experiment].title}\n{setting.label}"
