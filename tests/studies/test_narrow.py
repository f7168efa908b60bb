"""The baseline of narrow networks: nearest in bytes among even widths, and equal bytes where that is said."""

import pytest

from studies import narrow
from studies.options import overrides_of
from studies.runner import CONFIGS
from train.config.schema import load_config
from train.data import empty_dataset
from train.experiment.assembly import make_model, make_planner


def bytes_of(config):
    """Return the bytes of a shard and of its update, which have no tail here."""
    dataset = empty_dataset(config.data.name, **config.data.options)
    return 2 * make_planner(config).nbytes(make_model(config, dataset), config.keep_ratio)


@pytest.mark.parametrize("study", narrow.EXPERIMENTS)
def test_narrow_network_is_the_nearest_even_width_with_the_same_recipe(study):
    experiment = narrow.EXPERIMENTS[study]
    shards, equal_rounds, equal_bytes, *others = (
        load_config(CONFIGS / "beyond.yaml", overrides_of(experiment, arm, 1, ["local.optimizer.lr=0.02"]))
        for arm in experiment.arms.values()
    )
    recipe = ("server_optimizer", "result", "local", "clients", "data", "init", "evaluate_every")
    for other in (equal_rounds, equal_bytes):
        assert all(getattr(shards, key) == getattr(other, key) for key in recipe)
        options = other.model.options
        assert options["zero_init_last"] == shards.model.options["zero_init_last"]
        assert options["width"] / options["groups"] == shards.model.options["width"] / shards.model.options["groups"]
    for other in others:  # as the shards, but for the start
        model = shards.model.model_copy(update={"zero_init_last": True})
        assert other == shards.model_copy(update={"model": model})
    wanted, width = bytes_of(shards), equal_rounds.model.options["width"]

    def of_width(channels):
        options = {"width": channels, "groups": channels // 2}
        return bytes_of(equal_rounds.model_copy(update={"model": equal_rounds.model.model_copy(update=options)}))

    assert min((width - 2, width, width + 2), key=lambda channels: abs(of_width(channels) - wanted)) == width
    assert shards.rounds == equal_rounds.rounds == narrow.ROUNDS
    spent = equal_bytes.rounds * of_width(width) / (shards.rounds * wanted)
    assert spent == pytest.approx(1, abs=0.005)
