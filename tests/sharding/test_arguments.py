"""Arguments of another type than a public function takes are one `UserError`."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import sharding
from sharding import (
    STRATEGIES,
    FactorizedLinear,
    Gaussian,
    Server,
    ShardPlanner,
    UserError,
    factorize,
    iterate_average,
    recipes,
    save_factorized,
)

INPUTS = torch.ones(2, 8)
BATCHES = [(INPUTS, torch.tensor([0, 1]))]
PLANNER = ShardPlanner("top_n")
PRIVACY = Gaussian(clipping_norm=1.0, noise_multiplier=1.0, keep_ratios={0: 0.5}, per_round=1)
ONES = np.ones(2)
# The library makes these itself, or they are abstract.
MADE = {"Plan", "Shard", "Update", "Frozen", "LayerContext", "Allocation", "FactorizedLayer", "Sampler", "UserError"}


def make() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


MODEL = make()
SMALL = factorize(MODEL, 0.25)
PLAN = PLANNER.plan(MODEL, {0: 0.25})
SHARD = PLAN.shard(0)
PUBLIC: dict[str, dict[str, Any]] = {  # valid arguments of each function
    "factorize": {
        "model": MODEL,
        "keep_ratio": 0.25,
        "skip": "0",
        "inplace": False,
        "also": (),
        "calibration": [INPUTS],
    },
    "merge": {"model": SMALL, "inplace": False},
    "shardable_layers": {"model": MODEL, "skip": "0", "also": ()},
    "Energy": {"share": 0.9},
    "Budget": {"parameters": 1000},
    "unpack_attention": {"model": MODEL, "inplace": False},
    "register_layer": {"dense_type": nn.Bilinear, "factorized_type": FactorizedLinear, "on_demand": True},
    "save_factorized": {"model": SMALL, "folder": "one"},
    "load_factorized": {"folder": "saved", "model": MODEL, "device": "cpu"},
    "export_lora": {"model": SMALL, "start": SMALL, "folder": "two", "modules_to_save": ()},
    "freeze_except_factors": {"model": SMALL},
    "FactorizedLinear": {"dense": nn.Linear(8, 8), "num_terms": 2, "residual_format": "int4"},
    "FactorizedConv": {"dense": nn.Conv2d(8, 8, 1), "num_terms": 2, "residual_format": "int4"},
    "Server": {
        "model": MODEL,
        "planner": PLANNER,
        "optimizer": SGD(MODEL.parameters(), 1.0),
        "averaged": iterate_average(MODEL),
        "max_share": 0.5,
    },
    "Server ": {"model": MODEL, "planner": PLANNER, "privacy": PRIVACY},
    "Server.round": {"round": 0, "keep_ratios": {0: 0.5}, "train": lambda *_: None, "num_samples": {0: 1}},
    "Server.plan": {"keep_ratios": {0: 0.5}, "round": 0},
    "Server.plan_evaluation": {"keep_ratios": {0: 0.5}, "round": 0},
    "Server.average": {"plan": PLAN, "num_samples": {0: 1}, "total": 1},
    "Server.average_as_reported": {"plan": PLAN},
    "Server.step": {"average": Server(MODEL, PLANNER).average(PLAN)},
    "Server.load_state_dict": {"state": Server(MODEL, PLANNER).state_dict()},
    "ShardPlanner": {
        **{"strategy": "top_n", "design": "cps", "seed": 0, "skip": "0", "also": ()},
        **{"compression": "int8", "tail_format": "int4", "clip": 10.0},
    },
    "ShardPlanner.plan": {"model": MODEL, "keep_ratios": {0: 0.25}, "round": 0},
    "Gaussian": {
        "clipping_norm": 1,
        "noise_multiplier": 1,
        "keep_ratios": {0: 0.5},
        "per_round": 1,
        "sampling": "fixed",
    },
    "FedYogi": {"params": [*MODEL.parameters()], "lr": 0.1, "betas": (0.9, 0.99), "tau": 1e-3},
    "iterate_average": {"model": MODEL},
    "init_empty": {},
    "client_model": {"model": MODEL, "shard": SHARD, "copy": True, "frozen": None},
    "train_shard": {
        **{"model": MODEL, "shard": SHARD, "batches": BATCHES, "lr": 0.1, "frozen": None},
        **{"decay": 1e-4, "decay_of": "bounded", "loss": nn.functional.cross_entropy},
    },
    "train_shard ": {"model": MODEL, "shard": SHARD, "batches": BATCHES, "make_optimizer": lambda part: SGD(part, 0.1)},
    "checkpoint_blocks": {"model": nn.Sequential(nn.TransformerEncoderLayer(4, 1, 4))},
    "clip_and_decay": {"model": SMALL, "clip": 10.0, "decay": 1e-4, "decay_of": "bounded"},
    "Strategy": {"summary": "all", "allocate": STRATEGIES["top_n"].allocate, "clips": True, "nested": False},
    "Population": {"num_samples": ONES, "costs": ONES, "profiles": None},
    "optimal_inclusion": {"magnitudes": ONES, "budget": 1.5, "costs": ONES},
    "collective_inclusion": {"magnitudes": ONES, "num_terms": 1, "num_clients": 2},
    "successive_inclusion": {"weights": ONES, "num_terms": 1},
    "draw_terms": {"inclusion": ONES / 2, "design": "cps", "rng": np.random.default_rng(0), "size": 2},
    "recipes.published": {"model": MODEL},
    "recipes.tuned": {"model": MODEL, "keep_ratios": {0: 0.5}},
}
FREE = {"seed", "round", "train"}  # tests of the draws check the numbers; where nobody takes part, nobody trains


@pytest.fixture
def folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_factorized(SMALL, "saved")


def find(name: str) -> Callable[..., Any]:
    outer, _, inner = name.strip().partition(".")
    instances = {"Server": Server(make(), PLANNER), "ShardPlanner": PLANNER, "recipes": recipes}
    return getattr(instances[outer], inner) if inner else getattr(sharding, outer)


def test_every_public_function_is_in_the_table():
    public = {name for name in sharding.__all__ if callable(getattr(sharding, name))}
    assert {name.strip().partition(".")[0] for name in PUBLIC} == public - MADE | {"recipes"}
    for name, arguments in PUBLIC.items():
        assert arguments.keys() <= inspect.signature(find(name)).parameters.keys()


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name in PUBLIC for argument in PUBLIC[name] if argument not in FREE]
)
def test_an_argument_of_another_type_is_one_line(name, argument):
    valid = PUBLIC[name][argument]
    values: list[Any] = [object(), [object()]]
    if not isinstance(valid, dict):
        values.append({object(): object()})
    if not (isinstance(valid, str | tuple) or callable(valid)):  # a class can be a pattern of layers, or be called
        values.append(type(valid))
    for value in values:
        with pytest.raises((UserError, TypeError) if argument == "params" else UserError):  # torch names a wrong one
            find(name)(**PUBLIC[name] | {argument: value})
