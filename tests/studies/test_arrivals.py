"""The tables of the wireless studies, of runs that are written out."""

import pytest

from studies.arrivals import main_table, pilot_table, quartiles
from studies.curves import by_scheme
from train.report.text import frame_table
from train.variants.pilots import Calibration


def course(rounds, seconds, losses, accuracies):
    keys = ("rounds", "simulated", "train_set_loss", "test_accuracy")
    return [dict(zip(keys, row, strict=True)) for row in zip(rounds, seconds, losses, accuracies, strict=True)]


def test_arrivals_table_has_the_time_to_targets_and_their_counts(curves_of):
    fast = course([5, 10, 15], [10.0, 20.0, 30.0], [0.9, 0.5, 0.6], [0.1, 0.2, 0.8])
    slow = course([5, 10, 15], [100.0, 200.0, 300.0], [0.9, 0.7, 0.4], [0.7, 0.2, 0.6])
    never = course([5, 10], [7.0, 8.0], [0.9, 0.51], [0.1, 0.69])
    runs = {
        **{"proposed-0": fast, "proposed-1": fast, "weighted-0": slow, "weighted-1": never},
        **{"uniform, scaled steps-0": never, "uniform, scaled steps-1": never, "x-0": fast},
    }
    published = {"proposed": (200.0, 20.0), "weighted": (1300.0, 5.5), "uniform, scaled steps": None}
    table = main_table(by_scheme(curves_of(runs)), 0.5, 0.7, published)
    assert frame_table(table).splitlines()[2:] == [
        "| proposed | 10 ± 0 | 20 ± 0 | 1.00 | 200.0 ± 20.0 | 1.00 | 30 ± 0 | 2 of 2 |",
        "| weighted | 15 (1 not reached) | 300 (1 not reached) | 15.00 | 1,300.0 ± 5.5 | 6.50 "
        "| 100 (1 not reached) | 1 of 2 |",
        "| uniform, scaled steps | not reached | not reached | – | not reached | – | not reached | 0 of 2 |",
        "| x | 10 | 20 | 1.00 | – | – | 30 | 1 of 1 |",
    ]
    none = curves_of(runs | {"proposed-0": never, "proposed-1": never})
    ratios = main_table(by_scheme(none), 0.5, 0.7, published).ratio
    assert ratios.tolist() == ["–"] * 4, "without the proposed there is no ratio"


def test_pilots_table_tells_contradicting_from_unreached_losses():
    calibration = Calibration(2.0, [1.0], {"uniform": [5, 7, None], "weighted": [4, 8, 9]}, [2.0, None, None])
    published = {"uniform": (71, 81, 95), "weighted": (48, 57, 69)}
    assert pilot_table(calibration, [1.2, 1.1, 1.0], published).splitlines() == [
        "| loss | 1.2 | 1.1 | 1.0 |",
        "|---|---:|---:|---:|",
        "| uniform, rounds | 5 | 7 | – |",
        "| uniform, published | 71 | 81 | 95 |",
        "| weighted, rounds | 4 | 8 | 9 |",
        "| weighted, published | 48 | 57 | 69 |",
        "| β/α | 2 | contradicts | – |",
    ]


def test_quartiles_of_step_curves_keep_the_last_value():
    grid, (low, middle, high) = quartiles([[1.0, 10.0], [2.0, 5.0, 100.0]], [[4.0, 2.0], [8.0, 6.0, 1.0]])
    assert (grid[0], grid[-1]) == (pytest.approx(2), pytest.approx(100))
    assert (low[0], middle[0], high[0]) == (5, 6, 7)
    at_ten = grid.searchsorted(10)
    assert (middle[at_ten - 1], middle[at_ten]) == (5, 4)
    assert (low[-1], middle[-1], high[-1]) == (1.25, 1.5, 1.75)
