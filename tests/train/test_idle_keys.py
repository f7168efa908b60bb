"""A key that was set and that nothing reads is refused in one line, which names key, value, why and remedy."""

import pytest

from sharding import UserError
from tests.train.runs import QUICKSTART
from train.config.idle_keys import READINGS, refuse_idle
from train.config.schema import Config, read_config
from train.config.yaml_text import in_yaml
from train.sweep import grid_configs

OCS = ["clients.sampler=ocs", "clients.budget=2"]
TASKS = ["clients.sampler=mmfl", "clients.budget=2", "clients.signal=norm", "tasks={one: {}, two: {seed: 1}}"]
FULL = ["clients.sampler=mmfl", "clients.signal=full", "tasks={one: {}, two: {seed: 1}}"]
SYNTHETIC = ["data.name=synthetic", "model={name: mlp}"]
IDLE = [  # overrides, of which the last does nothing, and what the line says of it besides
    (["strategy=top_n", "design=brewer"], "strategy=top_n; "),
    (["keep_ratio=1", "design=brewer"], "keep_ratio=1.0; every client holds all terms"),
    (["strategy=dense", "init=as_built"], "strategy=dense; use it with strategy=top_n, "),
    (["keep_ratio=1", "init=as_built"], "keep_ratio=1.0 and clients.count=20; the strongest client holds all"),
    (["keep_ratio={0.5: 0.9, 1: 0.1}", "init=as_built"], "keep_ratio={'0.5': 0.9, '1.0': 0.1} and clients.count=20; "),
    (["strategy=dense", "alignment=true"], "strategy=dense; "),
    (["rounds=1", "local.schedule=constant"], "rounds=1; the first round has local.lr"),
    (["rounds=3", "tracking.layers_every=4"], "rounds=3; the first and the last round are recorded anyway"),
    ([*FULL, "clients.budget=2"], "clients.signal=full; remove one of them"),
    (["strategy=dense", "keep_ratio=0.3"], "strategy=dense; use it with strategy=top_n, "),
    (["strategy=full", "keep_ratio=0.3"], "strategy=full; "),
    (["strategy=top_n", "clip=3"], "strategy=top_n; use it with strategy=prism_wall"),
    (["server_optimizer=plain", "server_momentum=0.5"], "server_optimizer=plain; use it with server_optimizer="),
    (["evaluate_every=100", "patience=3"], "rounds=50 and evaluate_every=100; "),
    (["data.root=/nonexistent"], "data.name=digits; use it with data.name=shakespeare, cifar10, "),
    ([*SYNTHETIC, "data.root=/nonexistent"], "data.name=synthetic; "),
    ([*SYNTHETIC, "data.download=true"], "data.name=synthetic; "),
    (["strategy=dense", "local.frobenius_decay=0.1"], "strategy=dense; use it with strategy=top_n, "),
    (["strategy=dense", "local.frobenius_decay_of=effective"], "strategy=dense; "),
    (["strategy=dense", "tracking.layers_every=2"], "strategy=dense; "),
    (["clients.per_round=1", "aggregation.max_share=0.5"], "clients.per_round=1; invite more"),
    (["clients.per_round=1", "aggregation.norm_bound=2"], "clients.per_round=1; invite more"),
    (["clients.per_round=2", "aggregation.trim=0.1"], "clients.per_round=2; of two values none is left out"),
    (["data.download=true"], "data.name=digits; use it with data.name="),
    (["data.partition=iid", "data.alpha=3"], "data.partition=iid; use it with data.partition=dirichlet, "),
    (["data.fine_alpha=3"], "data.partition=dirichlet; use it with data.partition=pachinko"),
    (["data.concentration=per_class"], "data.partition=dirichlet; "),
    ([*OCS, "clients.replacement=true"], "clients.sampler=ocs; use it with clients.sampler=uniform or weighted"),
    (["clients.budget=2"], "clients.sampler=uniform; use it with clients.sampler=uniform_upload, "),
    ([*OCS, "clients.beta_over_alpha=1"], "clients.sampler=ocs; use it with clients.sampler=wireless"),
    (["clients.signal=norm"], "clients.sampler=uniform; use it with clients.sampler=mmfl"),
    (["clients.pilot_losses=[1.5]"], "clients.sampler=uniform; use it with clients.sampler="),
    (["network.compute=2"], "network.bandwidth=null; set network.bandwidth too"),
    (["network.communicate=2"], "network.bandwidth=null; "),
    (["local.steps=2", "local.epochs=3"], "local.steps=2; remove one of them"),
    (["local.frobenius_decay=0", "local.frobenius_decay_of=effective"], "local.frobenius_decay=0.0; "),
    *(
        ([f"tracking.{key}"], "tracking.wandb=disabled and tracking.use=[]; set tracking.wandb=online or offline")
        for key in ("project=x", "entity=x", "group=x", "name=x", "tags=[x]", "artifacts=true")
    ),
]


def load(path, overrides=()) -> Config:
    asked = read_config(path, overrides)
    refuse_idle([asked])
    return asked.config


@pytest.mark.parametrize(("overrides", "why"), IDLE, ids=lambda value: value[-1] if isinstance(value, list) else "")
def test_a_key_that_nothing_reads_is_refused(overrides, why):
    key, _, value = overrides[-1].partition("=")
    with pytest.raises(UserError) as refused:
        load(QUICKSTART, overrides)
    assert f"{key}={value}" in str(refused.value).replace(".0 ", " ")
    assert f"does nothing where {why}" in str(refused.value)


def test_every_reading_has_a_case():
    assert {key for row in READINGS for key in row.keys.split()} == {
        overrides[-1].partition("=")[0] for overrides, _ in IDLE
    }


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.fine_alpha=10"],
        ["server_optimizer=plain", "server_momentum=0.9"],
        ["clip=.inf"],
        ["strategy=dense", "local.frobenius_decay=0"],
        ["data.name=mnist", "data.root=/data", "data.download=true", "model={name: cnn}"],
        ["clip=3"],
        ["clients.per_round=3", "aggregation.trim=0.1"],
        ["keep_ratio={0.5: 0.96, 1: 0.04}", "init=as_built", "design=brewer"],  # of 20 clients none holds all terms
        ["rounds=2", "local.schedule=constant", "tracking.layers_every=2"],
        FULL,
    ],
)
def test_a_default_that_is_set_again_does_no_harm_nor_a_value_that_turns_something_off_or_is_read(overrides):
    load(QUICKSTART, overrides)


def test_a_key_of_the_file_that_the_command_line_makes_idle_is_kept(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("{name: x, rounds: 2, model: {name: mlp}, data: {name: digits}, clients: {count: 4, per_round: 3}, "
        "keep_ratio: 0.3, server_optimizer: momentum, server_momentum: 0.5}")  # fmt: skip
    assert load(path, ["strategy=dense"]).keep_ratio == 0.3
    assert load(path, ["server_optimizer=plain"]).server_momentum == 0.5
    path.write_text(path.read_text().replace("keep_ratio", "strategy: dense, keep_ratio"))
    with pytest.raises(UserError, match=r"keep_ratio=0\.3 does nothing where strategy=dense"):
        load(path)


def test_what_a_run_has_written_down_can_be_run_again(tmp_path):
    config = load(QUICKSTART, ["strategy=dense"])
    path = tmp_path / "config.yaml"
    path.write_text(in_yaml(config.model_dump(mode="json", exclude={"output"})))
    assert load(path) == config
    with pytest.raises(UserError, match=f"recipe=published changes nothing: {path} sets all of its keys"):
        load(path, ["recipe=published"])
    assert load(path, ["recipe=tuned"]) == config


def test_a_key_that_one_run_of_a_comparison_reads_is_kept():
    cells = grid_configs(QUICKSTART, ["keep_ratio=0.3"], ["collective", "dense"], None)
    assert [cell.keep_ratio for cell in cells] == [0.3, 0.3]
    cells = grid_configs(QUICKSTART, ["clients.budget=2"], [], None, ["clients.sampler=uniform,ocs"])
    assert [cell.clients.sampler_options for cell in cells] == [{"replacement": False}, {"budget": 2.0}]
    with pytest.raises(UserError, match="design=brewer does nothing"):
        grid_configs(QUICKSTART, ["design=brewer"], ["top_n", "dense"], None)


def test_a_key_that_one_of_several_models_reads_is_kept():
    own = "tasks={one: {}, two: {server_optimizer: plain}}"
    config = load(QUICKSTART, [*TASKS[:-1], own, "server_momentum=0.5"])
    assert config.server_momentum == 0.5
    with pytest.raises(UserError, match=r"tasks\.two\.server_momentum=0\.5 does nothing where server_optimizer=plain"):
        load(QUICKSTART, [*TASKS[:-1], own.replace("plain", "plain, server_momentum: 0.5")])


def test_a_key_of_the_whole_that_the_strategy_of_one_model_reads_is_kept():
    own = "strategy=dense", "tracking.layers_every=1"
    with pytest.raises(UserError, match=r"tracking\.layers_every=1 does nothing where strategy=dense"):
        load(QUICKSTART, [*TASKS, *own])
    tasks = "tasks={one: {}, two: {strategy: collective}}"
    assert load(QUICKSTART, [*TASKS[:-1], tasks, *own]).tracking.layers_every == 1
