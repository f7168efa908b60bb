"""Configuration: overrides, defaults, and one line for every mistake."""

from pathlib import Path

import pytest

from sharding import UserError
from train.config import AS_PUBLISHED, check_older, load_config
from train.yaml_text import read_yaml

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
    told = (config.start, config.server_optimizer, config.result, config.local.optimizer)
    assert ours == (told == ("low_rank", "look_ahead", "average", "scaled_sgd"))
    if not ours:
        published = (*(AS_PUBLISHED[key] for key in ("start", "server_optimizer", "result")), "sgd")
        assert told[1:] == published[1:]
        assert config.strategy == "dense" or told == published  # dense has no start of low rank


def test_a_run_older_than_an_option_has_not_used_it():
    held = read_yaml(QUICKSTART)
    told = check_older(held)
    ways = (told.start, told.server_optimizer, told.result, told.local.optimizer)
    assert ways == ("as_built", "plain", "last", "sgd")
    assert (told.server_lr, told.local.lr, told.local.batch_size) == (1.0, 0.1, held["local"]["batch_size"])
    assert check_older(held | {"start": "low_rank"}).start == "low_rank"


MISTAKES = {
    "clip=3": r"clip=3.0 does nothing where local.optimizer=scaled_sgd; use local.optimizer=sgd",
    "local.lrr=1": r"unknown config key 'local.lrr' \(did you mean 'local.lr'\?\)",
    "roundz=1": r"unknown config key 'roundz' \(did you mean 'rounds'\?\)",
    "lr=0.1": r"unknown config key 'lr' \(did you mean 'local.lr'\?\); docs/reference/configuration.md lists all keys",
    "clients.keep_ratios=1": r"unknown config key 'clients.keep_ratios' \(did you mean 'keep_ratio'\?\)",
    "local.clip=1": r"unknown config key 'local.clip' \(did you mean 'clip'\?\)",
    "xyzzy=1": r"unknown config key 'xyzzy'; docs",
    "strategy=colective": r"unknown strategy 'colective' \(did you mean 'collective'\?\); choose one of: collective, ",
    "design=cpss": r"unknown design 'cpss' \(did you mean 'cps'\?\)",
    "model.name=resnet18": r"unknown model 'resnet18' \(did you mean 'resnet18_gn'\?\)",
    "data.name=cifar": r"unknown dataset 'cifar' \(did you mean 'cifar10'\?\)",
    "data.partition=dirichlett": r"unknown partition 'dirichlett' \(did you mean 'dirichlet'\?\)",
    "clients.sampler=uniformly": r"unknown sampler 'uniformly' \(did you mean 'uniform'\?\)",
    "clients.per_round=21": r"clients.per_round is 21, but there are 20 clients; choose 1 to 20",
    "clients.budget=2": r"clients.budget=2.0 does nothing for the sampler uniform; it is for ocs, aocs",
    "clients.sampler=ocs": r"clients.budget is None; the expected number of uploads is needed, above 0 and at most",
    "clients.sampler=wireless": r"clients.sampler=wireless needs network.bandwidth",
    "network.bandwidth=0": r"bandwidth is 0.0; a finite number above 0 is needed",
    "keep_ratio=0": r"keep_ratio.*0.*greater than 0",
    "keep_ratio=1.5": r"keep_ratio.*1.5.*less than or equal to 1",
    "keep_ratio={0.2: 0.5}": r"the shares of keep_ratio \{0.2: 0.5\} sum to 0.5, not 1",
    "clip=0.5": r"clip=0.5: input should be greater than or equal to 1",
    "rounds=none": r"rounds='none': input should be a valid integer",
    "tracking.wandb=of": r"tracking.wandb='of': input should be 'disabled', 'online' or 'offline'",
    "tracking.wandb=on": r"tracking.wandb=True: input should be 'disabled', 'online' or 'offline'",
    "local=3": "local=3: ",
    "keep_ratio={0.2:0.7}": r"a colon in braces needs a blank after it: \{0.2: 0.7\}, not \{0.2:0.7\}",
    "keep_ratio={1:1}": r"a blank after it: \{1: 1\}, not \{1:1\}",
    "name.first=3": "cannot set 'name.first': 'name' is 'quickstart', not a section",
    "rounds": r"cannot read the override 'rounds'; write dotted.key=value",
    "rounds=[": r"cannot read the value '\[' of 'rounds' as YAML",
}


@pytest.mark.parametrize(("override", "message"), MISTAKES.items(), ids=MISTAKES.keys())
def test_a_mistake_is_told_in_one_line(override, message):
    with pytest.raises(UserError, match=message) as caught:
        load_config(QUICKSTART, [override])
    assert "\n" not in str(caught.value)
    assert "Pydantic" not in str(caught.value), "a default that follows from other keys is no mistake"


def test_off_is_a_word_for_disabled():
    assert load_config(QUICKSTART, ["tracking.wandb=off"]).tracking.wandb == "disabled"


def test_all_mistakes_are_told_at_once():
    with pytest.raises(UserError, match=r"rounds=0: .*; local.lr=-1: "):
        load_config(QUICKSTART, ["rounds=0", "local.lr=-1"])


def test_a_file_that_is_not_there_names_the_nearest():
    with pytest.raises(
        UserError, match=r"cannot read the config '.*quickstrat.yaml' \(did you mean '.*quickstart.yaml'"
    ):
        load_config(CONFIGS / "quickstrat.yaml")


@pytest.mark.parametrize(
    ("text", "message"), [("a: [", "is not valid YAML"), ("- a", "holds list"), ("", "lacks 'name'")]
)
def test_a_file_that_is_no_config_is_told(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)
