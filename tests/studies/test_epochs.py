"""The study of four local epochs: nothing else differs from that of one."""

from studies import epochs, narrow
from studies.options import overrides_of
from studies.runner import CONFIGS
from train.config.schema import load_config


def test_four_epochs_change_nothing_but_the_epochs_and_the_rates():
    one, four = narrow.EXPERIMENTS["narrow_fifth"], epochs.EXPERIMENTS["four_epochs"]
    assert [*four.arms] == ["r = 0.2 for all", "narrow, equal bytes"]
    for name in four.arms:
        before, after = (
            load_config(CONFIGS / "beyond.yaml", overrides_of(study, study.arms[name], 1, ["local.optimizer.lr=0.02"]))
            for study in (one, four)
        )
        assert before.local.epochs == 1
        assert after == before.model_copy(update={"local": before.local.model_copy(update={"epochs": 4})})
    shards, small = (arm.rates for arm in four.arms.values())
    assert small == (*shards, 0.04, 0.08, 0.16)  # the highest was the best, three times
