"""What every picture has in common."""

from train.plots import Point, accuracy_figure, styles_of


def height_of_axes(arms):
    labels = [f"strategy {arm}, wire=float32" for arm in range(arms)]
    curves = {label: [[Point(0, 1.0, 10.0), Point(1, 2.0, 20.0)]] for label in labels}
    figure = accuracy_figure(curves, styles_of(labels), "rounds", "many", [])
    figure.draw_without_rendering()
    return figure.axes[0].get_position().height * figure.get_figheight()


def test_a_long_legend_takes_no_room_from_the_curves():
    assert height_of_axes(10) > 0.97 * height_of_axes(4)
