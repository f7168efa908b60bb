"""The library's recipes are those of the program."""

import copy

import pytest
import torch
from torch import nn

from sharding import recipes
from train.config.schema import load_config
from train.experiment.assembly import first_model, make_planner, make_server

KEEP_RATIOS = {"a": 0.1, "b": 0.4, "c": 0.25}
CASES = {
    "published": (recipes.published, recipes.PUBLISHED_LR),
    "tuned": (lambda model: recipes.tuned(model, KEEP_RATIOS), recipes.TUNED_LR),
}


@pytest.mark.parametrize("name", CASES)
def test_recipe_is_that_of_the_program(name):
    make, lr = CASES[name]
    config = load_config("configs/quickstart.yaml", [f"recipe={name}"])
    assert config.local.optimizer.value("lr") == lr
    model = nn.Sequential(nn.Linear(8, 20), nn.Linear(20, 20), nn.Linear(20, 4))
    planner = make_planner(config)
    start = first_model(config, copy.deepcopy(model), planner.strategy, KEEP_RATIOS.values())
    theirs, ours = make_server(config, start, planner), make(model)
    for key in ("strategy", "design", "seed", "compression", "tail_format"):
        assert getattr(ours.planner, key) == getattr(theirs.planner, key)
    assert type(ours.optimizer) is type(theirs.optimizer)
    assert ours.optimizer.defaults == theirs.optimizer.defaults
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert (ours.averaged is None) == (theirs.averaged is None)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_tuned_starts_at_the_rank_of_the_median_client():
    server = recipes.tuned(nn.Sequential(nn.Linear(8, 20), nn.Linear(20, 20), nn.Linear(20, 4)), KEEP_RATIOS)
    assert torch.linalg.matrix_rank(server.model[1].weight) == 5
