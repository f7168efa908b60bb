"""Configuration: overrides, defaults, and one line for every mistake."""

from pathlib import Path

import pytest

from sharding import SAMPLERS, Sampler, UserError
from tests.train.runs import tiny
from train.config.schema import load_config
from train.experiment import assemble

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_config_in_the_repository_is_sound(path):
    assert load_config(path).name == path.stem


def test_overrides_are_yaml_and_reach_into_sections():
    config = load_config(
        QUICKSTART, ["local.lr=5e-2", "keep_ratio={0.1: 0.5, 1: 0.5}", "model.width=4", "strategy=top_n"]
    )
    assert config.local.lr == 0.05
    assert config.keep_ratio == {0.1: 0.5, 1.0: 0.5}
    assert config.model.options["width"] == 4
    assert str(config.directory) == "runs/quickstart-top_n-0"
    assert str(load_config(QUICKSTART, ["output=/tmp/x"]).directory) == "/tmp/x"


def test_the_quickstart_is_what_the_readme_says():
    config = load_config(QUICKSTART)
    assert (config.clients.count, config.clients.per_round) == (20, 5)
    assert (config.data.name, config.data.partition, config.data.alpha) == ("digits", "dirichlet", 1)
    assert config.keep_ratio == {0.2: 0.6, 0.4: 0.4}


def test_the_cifar_config_is_what_the_readme_says():
    config = load_config(CONFIGS / "cifar10_small.yaml")
    assert (config.clients.count, config.clients.per_round, config.data.alpha, config.keep_ratio) == (
        100,
        10,
        10,
        0.2,
    )


RATES = {  # (server_lr, server_momentum, local.lr) that follow from what steps
    (): (0.4, 0.8, 0.05),
    ("server_optimizer=plain",): (1.0, 0.9, 0.05),
    ("local.optimizer=sgd",): (0.4, 0.8, 0.1),
    ("server_optimizer=momentum", "server_lr=0.3", "local.optimizer=sgd", "local.lr=0.2"): (0.3, 0.9, 0.2),
    ("server_momentum=0.5", "local.lr=0.03"): (0.4, 0.5, 0.03),
}


@pytest.mark.parametrize(("overrides", "rates"), RATES.items(), ids=str)
def test_rates_that_are_not_told_follow_from_the_optimizers(overrides, rates):
    config = load_config(QUICKSTART, overrides)
    assert (config.server_lr, config.server_momentum, config.local.lr) == rates


def test_a_task_with_another_optimizer_has_the_rates_of_that():
    tasks = "tasks={one: {}, two: {server_optimizer: plain, local: {optimizer: sgd}}, three: {local: {lr: 0.3}}}"
    words = ["clients.sampler=mmfl", "clients.signal=loss", "clients.budget=2", tasks]
    its = load_config(QUICKSTART, words).task_configs()
    assert [(task.server_lr, task.local.lr) for task in its.values()] == [(0.4, 0.05), (1.0, 0.1), (0.4, 0.3)]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_what_is_published_trains_by_the_published_algorithm(path):
    config = load_config(path)
    ours = path.stem in ("quickstart", "cifar10_small")
    told = (config.init, config.server_optimizer, config.result, config.local.optimizer)
    assert ours == (told == ("low_rank", "nesterov", "average", "scaled_sgd"))
    if not ours:
        published = ("as_built", "plain", "last", "sgd")
        assert told[1:] == published[1:]
        assert config.strategy == "dense" or told == published  # dense has no start of low rank


def test_off_is_a_word_for_disabled():
    assert load_config(QUICKSTART, ["tracking.wandb=off"]).tracking.wandb == "disabled"


class Later(Sampler):
    name = "later"

    def __init__(self, num_clients, per_round, seed, population=None, *, budget=None, wait=1):
        super().__init__(num_clients, per_round, seed, population)
        self.budget, self.wait = budget, wait


def test_a_custom_sampler_has_options_of_its_own_and_may_share_known_ones(tmp_path, monkeypatch):
    monkeypatch.setitem(SAMPLERS, "later", Later)
    own = ["clients.sampler=later", "clients.budget=2", "clients.options.wait=3"]
    sampler = assemble(tiny(tmp_path, *own)).sampler
    assert (sampler.budget, sampler.wait) == (2.0, 3)
    for option, why in (("wat=3", "'wat'.*wait"), ("wait=soon", "whole number"), ("budget=2", "set clients.budget")):
        with pytest.raises(UserError, match=why):
            tiny(tmp_path, *own, f"clients.options.{option}")
    with pytest.raises(UserError, match="uniform has no option 'wait'"):
        tiny(tmp_path, "clients.options.wait=3")
