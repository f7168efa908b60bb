"""Configuration: recipes, parts with options, overrides, one reader of values, and one line for every mistake."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import MODELS
from sharding import SAMPLERS, Sampler, UserError
from tests.train.runs import tiny
from train.cli.sweep import grid_configs
from train.config import schema
from train.config.schema import check_config, flatten, load_config, merge
from train.config.yaml_text import dump_yaml, in_yaml, parse_yaml, read_yaml
from train.data.partition import PARTITIONS
from train.experiment.assembly import assemble

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
QUICKSTART = CONFIGS / "quickstart.yaml"
TUNED, PUBLISHED = ("low_rank", "nesterov", "average"), ("as_built", "plain", "last")
FINE_TUNING = ("low_rank", "plain", "last")


def algorithm_of(config):
    return config.init, config.server_optimizer.name, config.result


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.usefixtures("registries_as_before")
def test_config_of_a_published_experiment_has_the_published_recipe(path):
    recipe = TUNED if path.stem in ("quickstart", "cifar10_small", "privacy", "privacy_cifar10") else PUBLISHED
    recipe = FINE_TUNING if path.stem.startswith("finetune") else recipe
    assert algorithm_of(load_config(path)) == recipe


@pytest.mark.parametrize("path", sorted((ROOT / "results").rglob("config.yaml")), ids=lambda path: path.parent.name)
def test_config_of_a_committed_run_loads_and_is_complete(path):
    values = read_yaml(path)
    later = {"skip": ["first", "last"], "local": {"checkpoint": False}}  # of runs that were made before these keys
    assert check_config(values).model_dump(mode="json", exclude={"output"}) == merge(later, values)


def test_recipe_sets_what_the_configuration_does_not():
    published = load_config(QUICKSTART, ["recipe=published"])
    assert algorithm_of(published) == PUBLISHED
    assert published.strategy == "collective"
    assert published.server_optimizer.options == {"lr": 1.0}
    assert published.local.optimizer.options == {"lr": 0.1, "momentum": 0.9}
    assert load_config(QUICKSTART).strategy == "top_n"
    assert load_config("tests/quickstart.yaml") == load_config(QUICKSTART, ["strategy=collective"])
    mixed = load_config(QUICKSTART, ["recipe=published", "local.optimizer.lr=0.5", "result=average"])
    assert (*algorithm_of(mixed), mixed.local.optimizer.options["lr"]) == ("as_built", "plain", "average", 0.5)
    with pytest.raises(UserError, match="unknown recipe 'paper'; choose one of: published, tuned"):
        load_config(QUICKSTART, ["recipe=paper"])


def test_config_of_a_run_can_be_run_again_but_has_no_other_recipe(tmp_path):
    config = load_config(QUICKSTART, ["strategy=dense", "tracker=wandb", "tracker.mode=offline"])
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config.model_dump(mode="json", exclude={"output"})))
    assert load_config(path) == config
    assert load_config(path, ["tracker.mode=online"]).tracker[0].options["mode"] == "online"
    with pytest.raises(UserError, match=f"recipe=published changes nothing: {path} sets all of its keys"):
        load_config(path, ["recipe=published"])
    assert pickle.loads(pickle.dumps(config)) == config


IN_FILE = {"width": 16, "blocks": (1, 1, 1), "groups": 4, "stem_stride": 1, "zero_init_last": False}


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ([], IN_FILE),
        (["model=resnet18_gn"], IN_FILE),
        (["model.width=32"], IN_FILE | {"width": 32}),
        (["model={width: 32}"], IN_FILE | {"width": 32}),
        (["model=mlp"], {"hidden": (64,)}),
        (["model.name=mlp"], {"hidden": (64,)}),
        (["model.hidden=[8]", "model=mlp"], {"hidden": (8,)}),
        (["model={name: mlp, hidden: [8]}"], {"hidden": (8,)}),
    ],
)
def test_override_of_a_part_sets_its_options_and_another_name_drops_them(overrides, options):
    assert load_config(QUICKSTART, overrides).model.options == options


def test_override_of_the_dataset_keeps_its_partition_and_drops_its_options(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        QUICKSTART.read_text().replace("{name: digits,", "{name: synthetic, clients: 30, seed: 5, holdout: 7,")
    )
    data = load_config(path, ["data=digits", "data.partition.alpha=0.1"]).data
    assert (data.options, data.holdout, data.partition.options) == ({}, 7, {"alpha": 0.1})


def test_task_overrides_set_into_a_task_and_keep_its_other_keys():
    tasks = ["clients.sampler={name: mmfl, budget: 2}", "local.epochs=1"]
    tasks += ["tasks={a: {seed: 1, data: {partition: iid}}, b: {server_optimizer: plain, local: {batch_size: 3}}}"]
    config = load_config(QUICKSTART, [*tasks, "tasks.a.model=mlp", "tasks.a.model.hidden=[3]"])
    a, b = config.models()
    assert (a.name, b.name, a.directory, b.directory) == ("a", "b", config.directory, config.directory)
    assert (a.seed, a.model.name, a.model.options, a.clients.sampler.name) == (1, "mlp", {"hidden": (3,)}, "uniform")
    assert (b.seed, b.model, b.server_optimizer.options) == (0, config.model, {"lr": 1.0})
    assert (a.data.partition.name, a.data.name, b.data) == ("iid", "digits", config.data)
    assert (a.local, b.local) == (config.local, config.local.model_copy(update={"batch_size": 3}))


def test_merge_replaces_values_and_leaves_its_arguments_alone():
    base = {"keep_ratio": {0.1: 1}, "model": "mlp", "local": {"epochs": 1, "optimizer": {"name": "sgd", "lr": 1}}}
    before = in_yaml(base)
    merged = merge(base, {"keep_ratio": {0.2: 1}, "model": {"hidden": [1]}, "local": {"optimizer": {"lr": 2}}})
    assert merged == {
        "keep_ratio": {0.2: 1},
        "model": {"name": "mlp", "hidden": [1]},
        "local": {"epochs": 1, "optimizer": {"name": "sgd", "lr": 2}},
    }
    assert in_yaml(base) == before
    assert list(flatten(merged)) == [
        *("keep_ratio", "model", "model.hidden", "local.epochs", "local.optimizer", "local.optimizer.lr")
    ]


VALUES = {  # YAML 1.2
    **{"010": 10, "1e-1": 0.1, "1e-05": 1e-5, "0x1f": 31, "0o10": 8, "+3": 3, ".5": 0.5, ".inf": float("inf")},
    **{"on": "on", "off": "off", "yes": "yes", "1:30": "1:30", "2020-01-02": "2020-01-02", "2020-13-45": "2020-13-45"},
    **{"true": True, "null": None, "~": None, "": None, "'1'": "1", "=": "=", "{0.2: 1}": {0.2: 1}},
}


@pytest.mark.parametrize(("text", "value"), VALUES.items())
def test_parse_yaml_reads_the_core_schema_of_yaml_1_2(text, value):
    parsed = parse_yaml(text)
    assert (parsed, type(parsed)) == (value, type(value))


SAME_EVERYWHERE = {
    **{"010": 10, "008": 8, "0o10": 8, "1e-1": 0.1, "0x1f": 31, "'010'": "010", "1_000": 1000},
    **{word: word for word in ("on", "off", "yes", "no", "1:30", "2020-01-02", "2020-01-02 03:04:05")},
}


@pytest.mark.parametrize(("text", "value"), SAME_EVERYWHERE.items())
def test_value_in_a_file_a_recipe_an_override_and_a_grid_is_the_same(text, value, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "echo", lambda input_shape, num_classes, value=None: None)
    published = (schema.RECIPES / "tuned.yaml").read_text()
    monkeypatch.setattr(schema, "RECIPES", tmp_path)
    (tmp_path / "tuned.yaml").write_text(published)
    file = tmp_path / "config.yaml"
    without_model = "".join(line for line in QUICKSTART.read_text().splitlines(True) if not line.startswith("model"))

    file.write_text(f"{without_model}\nmodel: {{name: echo, value: {text}}}\n")
    in_file = load_config(file)
    file.write_text(f"{without_model}\nmodel: echo\n")
    in_override = load_config(file, [f"model.value={text}"])
    (in_grid,) = grid_configs(file, [], [], None, [f"model.value={text}"])
    file.write_text(without_model)
    (tmp_path / "tuned.yaml").write_text(f"{published}\nmodel: {{name: echo, value: {text}}}\n")
    schema._read_recipe.cache_clear()
    in_recipe = load_config(file)
    schema._read_recipe.cache_clear()
    for config in (in_file, in_override, in_grid, in_recipe):
        assert (config.model.options["value"], type(config.model.options["value"])) == (value, type(value))


words = st.text("abenot01x.+-_~ α/", max_size=6)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words


@given(st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(words, inner)))
def test_parse_yaml_of_dumped_values_is_equal(value):
    assert parse_yaml(dump_yaml(value)) == value
    assert parse_yaml(in_yaml(value)) == value
    assert "\n" not in in_yaml(value)


class Later(Sampler):
    name = "later"

    def __init__(
        self, num_clients, per_round, seed, population=None, *, budget: float, wait=1, note: str | None = None
    ):
        super().__init__(num_clients, per_round, seed, population)
        self.budget, self.wait, self.note = budget, wait, note


def test_own_sampler_is_checked_by_its_signature(tmp_path, monkeypatch):
    monkeypatch.setitem(SAMPLERS, "later", Later)
    overrides = ["clients.sampler=later", "clients.sampler.budget=2", "clients.sampler.wait=3"]
    sampler = assemble(tiny(tmp_path, *overrides)).sampler
    assert (sampler.budget, type(sampler.budget), sampler.wait, sampler.note) == (2.0, float, 3, None)
    for option, reason in (
        ("wat=3", r"later has no option 'wat' \(did you mean 'wait'\?\); its options: budget, wait=1, note"),
        ("wait=soon", r"clients\.sampler\.wait='soon': input should be a valid integer"),
        ("budget=true", r"clients\.sampler\.budget=True: true and false are not numbers"),
        ("budget=.nan", r"clients\.sampler\.budget=nan: input should be a finite number"),
        ("note=3", r"clients\.sampler\.note=3: input should be a valid string"),
    ):
        with pytest.raises(UserError, match=reason):
            tiny(tmp_path, *overrides, f"clients.sampler.{option}")
    with pytest.raises(UserError, match="later needs the option 'budget'; its options: budget, wait=1, note"):
        tiny(tmp_path, "clients.sampler=later")
    with pytest.raises(UserError, match="uniform has no option 'wait'"):
        tiny(tmp_path, "clients.sampler.wait=3")


def test_configured_options_reach_the_parts(tmp_path, monkeypatch):
    iid, given = PARTITIONS["iid"], []

    def mine(dataset, num_clients, rng, *, alpha: float = 1.0):
        given.append(alpha)
        return iid(dataset, num_clients, rng)

    monkeypatch.setitem(PARTITIONS, "mine", mine)
    partition = ["data.partition=mine", "data.partition.alpha=2"]
    task = assemble(tiny(tmp_path, *partition, "design=brewer", "local.clip=3"))
    assert (given, task.server.planner.design, task.server.planner.clip) == ([2.0], "brewer", 3.0)
    assert assemble(tiny(tmp_path, "strategy=prism_wallenius")).server.planner.clip is None


def test_option_that_may_be_a_number_or_a_tensor_is_refused_once():
    with pytest.raises(UserError, match=r"^local\.optimizer\.lr='abc': input should be a valid number, [a-z ]+$"):
        load_config(QUICKSTART, ["local.optimizer.lr=abc"])


def test_task_with_another_dataset_keeps_the_root_of_the_data(tmp_path):
    sampler = "clients.sampler={name: mmfl, signal: uniform, budget: 2}"
    tasks = "tasks={one: {data: {name: cifar10}}, two: {data: {name: synthetic}}}"
    config = load_config(QUICKSTART, ["data.name=mnist", f"data.root={tmp_path}", sampler, tasks])
    assert {task.name: task.data.options.get("root") for task in config.models()} == {"one": tmp_path, "two": None}
