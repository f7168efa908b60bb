"""What every picture has in common."""

import pandas as pd

from train.report.frame import mean_curve
from train.report.plots import add_legend, curve_figure, styles_of


def line(*points):
    """Return the mean curve of one run."""
    xs, ys = zip(*points, strict=True)
    return mean_curve(pd.DataFrame({"run": "a", "rounds": xs, "test_accuracy": ys}), "test_accuracy")


def height_of_axes(arms):
    labels = [f"strategy {arm}, compression=float32" for arm in range(arms)]
    curves = {label: line((1, 0.1), (2, 0.2)) for label in labels}
    figure = curve_figure(curves, styles_of(labels), "rounds", "test_accuracy", "many")
    add_legend(figure, figure.axes[0])
    figure.draw_without_rendering()
    return figure.axes[0].get_position().height * figure.get_figheight()


def test_long_legend_leaves_the_height_of_the_axes():
    assert height_of_axes(10) > 0.97 * height_of_axes(4)


def test_styles_of_many_lines_differ():
    many = list(styles_of(map(str, range(30))).values())
    assert len(set(many)) == 30
    styles = many[:7]
    assert len({style.color for style in styles}) == len({style.marker for style in styles}) == 7
    curves = {style.marker: line(*((t, 0.01) for t in range(100))) for style in styles}
    figure = curve_figure(curves, {style.marker: style for style in styles}, "rounds", "test_accuracy", "alike")
    marked = {tuple(line.get_markevery()) for line in figure.axes[0].get_lines()}
    assert len(marked) == 7, "lines that coincide show their markers side by side"
