"""The study of full rank begins where it says, and compares three methods in one setting."""

import pytest

from studies import full_rank
from studies.runner import Arguments


def test_images_start_from_the_pretrained_network(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("studies.runner.run_all", lambda configs, *_: seen.extend(configs))
    weights = full_rank.EXPERIMENTS["full_rank_images"].prepare(Arguments("full_rank_images", tmp_path))
    assert seen == ["pretrained-0"]
    assert weights == {"": {"model.weights": tmp_path / "runs" / "pretrained-0" / "model.safetensors"}}


@pytest.mark.parametrize("name", full_rank.EXPERIMENTS)
def test_methods_have_one_rank_and_little_skew(name):
    study = full_rank.EXPERIMENTS[name]
    ((setting, scenario),) = study.settings.items()
    assert (setting, len(scenario.keep_ratios)) == ("even, α = 1", 1)
    assert scenario.overrides == {"data.partition.alpha": 1}
    assert scenario.waves == (full_rank.METHODS,)
    assert (*study.methods,) == full_rank.METHODS
