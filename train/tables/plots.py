"""The pictures of tables and figures."""

from collections.abc import Sequence
from math import ceil

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture

from train.plots import LABELS, Point, draw_band, lay_out, style_of
from train.tables.cells import is_whole
from train.tables.layout import Layout, Matrix, Panel, Setting
from train.tables.results import Grid, summarize


def draw_table(matrix: Matrix, grid: Grid, layout: Layout) -> Picture:
    """Draw one panel a setting that has been run: ours as dots with deviations, the published values hollow."""
    settings = _run_settings(matrix, grid) or matrix.settings()
    columns = min(len(settings), 3)
    rows = ceil(len(settings) / columns)
    size = (4.2 * columns + 1, (0.28 * len(matrix.strategies) + 1.2) * rows + 0.4)
    picture = Picture(figsize=size, layout="constrained")
    panels = picture.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    for axes in panels[len(settings) :]:
        axes.set_visible(False)
    for axes, setting in zip(panels, settings, strict=False):
        _draw_setting(axes, matrix, grid, layout, setting)
    panels[0].invert_yaxis()
    handles, labels = panels[0].get_legend_handles_labels()
    picture.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    return picture


def _draw_setting(axes: Axes, matrix: Matrix, grid: Grid, layout: Layout, setting: Setting) -> None:
    labels = {"ours": "ours", "published": "published (its own scale)"}
    for place, strategy in enumerate(matrix.strategies):
        ours, known = summarize(grid[setting, strategy]), layout.published_of(setting, strategy)
        if ours.mean is not None:
            color = style_of(strategy).color
            axes.errorbar(ours.mean, place, xerr=ours.deviation, fmt="o", color=color, label=labels.pop("ours", None))
        if known is not None:
            spread = known[1] if len(known) > 1 else None
            label = labels.pop("published", None)
            axes.errorbar(known[0], place, xerr=spread, fmt="D", color="0.55", markerfacecolor="none", label=label)
    axes.set_yticks(range(len(matrix.strategies)), matrix.strategies)
    axes.set_title(f"{layout.experiments[setting.experiment].title}\n{setting.label}", fontsize=9)
    axes.set_xlabel(LABELS["test_accuracy"])
    axes.grid(alpha=0.3)


def draw_curves(matrix: Matrix, grid: Grid, layout: Layout, panels: Sequence[Panel]) -> Picture:
    """Draw one row of panels a setting that has been run; one color a strategy, its seeds' mean in a band."""
    settings = _run_settings(matrix, grid) or matrix.settings()[:1]
    size = (4.6 * len(panels) + 2, 3.0 * len(settings) + 0.2)
    picture = Picture(figsize=size, layout="constrained")
    axes_of = picture.subplots(len(settings), len(panels), squeeze=False)
    for row, setting in zip(axes_of, settings, strict=True):
        for axes, panel in zip(row, panels, strict=True):
            _draw_panel(axes, matrix, grid, setting, panel)
        row[0].set_title(f"{layout.experiments[setting.experiment].title}\n{setting.label}", fontsize=9, loc="left")
    handles: dict[str, Artist] = {}
    for axes in axes_of.flatten():
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    picture.legend(list(handles.values()), list(handles), loc="outside right upper", frameon=False)
    return picture


def _draw_panel(axes: Axes, matrix: Matrix, grid: Grid, setting: Setting, panel: Panel) -> None:
    for strategy in matrix.strategies:
        points = [outcome.curve(panel.x, panel.y, panel.smooth) for outcome in grid[setting, strategy]]
        curves = [[Point(place, *xy) for place, xy in enumerate(zip(*its, strict=True))] for its in points]
        draw_band(axes, curves, style_of(strategy), strategy)
    lay_out(axes, panel.x, panel.y)
    if panel.smooth:
        axes.set_ylabel(f"{LABELS.get(panel.y, panel.y)}\nmoving average {panel.smooth:g}")


def _run_settings(matrix: Matrix, grid: Grid) -> list[Setting]:
    """Return the settings of which a cell of their own has begun; if none has, those with runs for all keep ratios."""
    begun = {cell for cell, outcomes in grid.items() if any(outcome.rounds for outcome in outcomes)}
    drawn = {setting for setting, strategy in begun if not is_whole(strategy)} or {setting for setting, _ in begun}
    return [setting for setting in matrix.settings() if setting in drawn]
