"""What a run accumulates over its rounds, and when it ends early."""

import pytest

from sharding import UserError
from tests.train.runs import QUICKSTART
from train.config.schema import load_config
from train.experiment.history import History
from train.experiment.metrics import RoundMetrics


def rounds_of(**values):
    """Return the metrics of rounds, from lists of one value each."""
    counts = {"num_clients": 2, "num_aggregated": 2, "num_failed": 0, "failed_by_kind": {}, "failures": {}}
    sizes = {"bytes_down": 3, "bytes_up": 4, "bytes_dense": 9}
    return [
        RoundMetrics(round=t, **counts, **sizes, **dict(zip(values, row, strict=True)))
        for t, row in enumerate(zip(*values.values(), strict=True))
    ]


def completed(config, rounds, earlier=()):
    history = History(config, earlier)
    return [metrics | history.complete(metrics) for metrics in rounds]


@pytest.mark.parametrize(
    ("overrides", "accuracies", "end"),
    [(["target_accuracy=0.5"], [0.1, None, 0.5, 0.6], 2), ([], [0.1, 0.1, 0.1], None)],
)
def test_complete_at_a_target_sets_the_reason_to_stop(overrides, accuracies, end):
    config = load_config(QUICKSTART, overrides)
    rounds = completed(config, rounds_of(test_accuracy=accuracies))
    assert next((metrics.round for metrics in rounds if metrics.stopped), None) == end
    if end is not None:  # what an earlier process has seen counts
        (last,) = completed(config, rounds_of(test_accuracy=accuracies)[end : end + 1], rounds[:end])
        assert last.stopped


def test_complete_with_two_targets_stops_when_each_has_been_reached():
    config = load_config(QUICKSTART, ["target_loss=0.4", "evaluate_training=true"])
    values = {"test_accuracy": [0.6, 0.4, 0.4], "train_set_loss": [0.9, 0.5, 0.3]}
    reasons = [metrics.stopped for metrics in completed(config, rounds_of(**values))]
    assert reasons == [None, None, "training loss 0.3 has reached target_loss=0.4"]
    both = config.model_copy(update={"target_accuracy": 0.5})
    reasons = [metrics.stopped for metrics in completed(both, rounds_of(**values))]
    assert reasons[:2] == [None, None]
    assert reasons[2].startswith("test accuracy 60.0 % has reached target_accuracy=0.5 and training loss 0.3")
    with pytest.raises(UserError, match="target_loss=… needs evaluate_training=true"):
        load_config(QUICKSTART, ["target_loss=0.4"])


def test_complete_accumulates_bytes_and_the_best_accuracy():
    rounds = completed(load_config(QUICKSTART), rounds_of(test_accuracy=[None, 0.4, None, 0.3]))
    assert [metrics.bytes_total for metrics in rounds] == [7, 14, 21, 28]
    assert [metrics.best_accuracy for metrics in rounds] == [None, 0.4, 0.4, 0.4]


def test_from_dict_of_to_dict_is_the_same_metrics():
    (metrics,) = rounds_of(test_accuracy=[0.5], extra=[{"one/lr": 0.1}])
    line = metrics.to_dict()
    assert "train_loss" not in line
    assert line["one/lr"] == 0.1
    assert RoundMetrics.from_dict(line) == metrics
