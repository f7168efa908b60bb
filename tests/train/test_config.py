"""Configuration: overrides, defaults, and one line for every mistake."""

from pathlib import Path

import pytest

from sharding import SAMPLERS, Sampler, UserError
from tests.train.runs import tiny
from train.assembly import assemble
from train.config.schema import load_config
from train.data.partition import PARTITIONS, Concentration

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"


TUNED, PUBLISHED = ("low_rank", "nesterov", "average"), ("as_built", "plain", "last")


def algorithm_of(config):
    return config.init, config.server_optimizer, config.result


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_what_is_published_trains_by_the_published_algorithm(path):
    ours = path.stem in ("quickstart", "cifar10_small")
    assert algorithm_of(load_config(path)) == (TUNED if ours else PUBLISHED)


def test_a_recipe_sets_what_is_not_set_otherwise():
    published = load_config(QUICKSTART, ["recipe=published"])
    assert algorithm_of(published) == PUBLISHED
    assert (published.strategy, published.server_lr, published.local.lr) == ("collective", 1.0, 0.1)
    assert load_config(QUICKSTART).strategy == "top_n"
    assert load_config("tests/quickstart.yaml") == load_config(QUICKSTART, ["strategy=collective"])
    mixed = load_config(QUICKSTART, ["recipe=published", "local.lr=0.5", "result=average"])
    assert (*algorithm_of(mixed), mixed.local.lr) == ("as_built", "plain", "average", 0.5)
    with pytest.raises(UserError, match=r"recipe=.*'tuned' or 'published'"):
        load_config(QUICKSTART, ["recipe=paper"])


def test_another_model_has_none_of_the_options_of_the_file_s():
    assert load_config(QUICKSTART).model.options
    assert load_config(QUICKSTART, ["model.name=mlp"]).model.options == {}
    assert load_config(QUICKSTART, ["model.hidden=[8]", "model.name=mlp"]).model.options == {"hidden": [8]}
    same = load_config(QUICKSTART).model
    assert load_config(QUICKSTART, [f"model.name={same.name}"]).model == same


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


def test_what_is_configured_reaches_the_parts(tmp_path, monkeypatch):
    iid, told = PARTITIONS["iid"], []
    monkeypatch.setitem(PARTITIONS, "own", lambda data, count, rng, how: told.append(how) or iid(data, count, rng, how))
    dealt = ["data.partition=own", "data.alpha=2", "data.fine_alpha=5", "data.concentration=per_class"]
    parts = assemble(tiny(tmp_path, *dealt, "design=brewer", "clip=3"))
    assert (told, parts.server.planner.design, parts.job.clip) == ([Concentration(2.0, 5.0, True)], "brewer", 3.0)
    assert assemble(tiny(tmp_path, "strategy=top_n")).job.clip is None
