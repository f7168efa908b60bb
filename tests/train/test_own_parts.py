"""Parts of your own: each example is run as its text says, by itself and in several processes."""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from models import MODELS
from sharding import STRATEGIES, Allocation, ShardPlanner, Strategy, UserError, draw_terms
from sharding.client_sampling import UniformSampler
from tests.train.runs import QUICKSTART, SMALL, TINY, read
from train.cli.commands import main
from train.cli.sweep import grid_configs
from train.config.naming import describe, settings_in_name, with_directory
from train.config.overrides import expand
from train.config.schema import load_config
from train.data.partition import PARTITIONS
from train.engines import processes
from train.engines.sequential import SequentialEngine
from train.experiment.assembly import assemble
from train.registries import SCHEDULES, import_parts
from train.run import run
from train.rundir.directory import is_finished
from train.rundir.file_names import MODEL_FILE
from train.rundir.records import read_layers

TWENTY_CLIENTS = [*TINY, "clients.count=20"]
EXAMPLES = {
    "own_strategy": [QUICKSTART, *TWENTY_CLIENTS, "strategy=even"],
    "own_draws": [
        *(QUICKSTART, *TWENTY_CLIENTS, "design=random_order", "clients.sampler=in_turn", "data.partition=halves")
    ],
    "own_training": [
        *(QUICKSTART, *TWENTY_CLIENTS, "local.loss=smoothed", "local.schedule=warm_up"),
        "local.optimizer={name: sign_sgd, lr: 0.0003, decay: 0.01}",
    ],
    "own_tracker": [QUICKSTART, *TWENTY_CLIENTS, "tracker=csv"],
    "own_data_model": ["examples/moons.yaml", "data.noise=0.2", "model.activation=gelu"],
}


pytestmark = pytest.mark.usefixtures("registries_as_before", "undrawn")


@pytest.mark.parametrize("example", EXAMPLES)
def test_run_with_any_example_part_trains(tmp_path, example):
    path, *overrides = EXAMPLES[example]
    config = load_config(path, [f"plugins=[examples.{example}]", *overrides, f"output={tmp_path}"])
    lines = read(run(config))
    assert len(lines) == config.rounds
    assert not any(line["num_failed"] for line in lines)
    if example == "own_tracker":
        assert len((tmp_path / "accuracy.csv").read_text().splitlines()) == 2
    if example == "own_data_model":
        assert lines[-1]["test_accuracy"] > 0.8


def test_plugins_of_the_command_line_add_to_those_of_the_file():
    config = load_config("examples/moons.yaml", ["plugins=[examples.own_strategy]", "strategy=even"])
    assert config.plugins == ("examples.own_data_model", "examples.own_strategy")


def test_compare_with_custom_parts_trains_in_processes(tmp_path, capsys):
    options = ["--import", "examples.own_strategy", "--strategies", "even", "--grid", "local.optimizer.lr=0.03,0.1"]
    assert main(["compare", QUICKSTART, *options, "--quiet", *TINY, f"output={tmp_path}"]) == 0
    assert capsys.readouterr() == ("", "")
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"even-lr=0.03-0", "even-lr=0.1-0"}
    assert read(tmp_path / "even-lr=0.03-0")[0]["lr"] == 0.03
    summary = (tmp_path / "summary.md").read_text()
    assert "| even | 0.03 |" in summary
    assert "| even | 0.1 |" in summary


def all_alike(group):
    return np.ones(len(group.magnitudes)), np.ones(len(group.magnitudes))


def test_registered_function_as_a_strategy_is_refused():
    STRATEGIES["even"] = all_alike
    with pytest.raises(UserError, match=r"strategy 'even' is <function .*; pass Strategy\('what it does"):
        load_config(QUICKSTART, ["strategy=even"])
    planner = ShardPlanner(Strategy("all", all_alike), seed=0)
    with pytest.raises(UserError, match=r"layer 1: the strategy returned \(array.*; an Allocation\(π, ω\) is needed"):
        planner.plan(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))), {0: 0.5})


class WithExtraState(nn.Linear):
    """A layer with state that is no tensor."""

    def get_extra_state(self):
        return {"steps": 1}


def perceptron(*sizes, last=None):
    return nn.Sequential(nn.Flatten(), *(nn.Linear(*pair) for pair in pairwise(sizes)), *([last] if last else []))


UNFIT = {
    "is None; its function must return an nn.Module": lambda: None,
    "is <class 'torch.nn.*must return an nn.Module": lambda: nn.Linear,
    "cannot read the samples of digits: RuntimeError: .*shapes cannot be multiplied": lambda: perceptron(5, 8, 10),
    "cannot read the samples of digits: RuntimeError: .*dtype": lambda: perceptron(64, 8, 10).double(),
    r"returns logits of shape \(2, 3\) for 2 samples; shape \(2, 10\) is needed": lambda: perceptron(64, 8, 3),
    "returns .* for 2 samples; shape": lambda: perceptron(64, 10, last=nn.AdaptiveMaxPool1d(10, return_indices=True)),
    "has no parameter to train": lambda: nn.Flatten(),
    "1._extra_state of the model own cannot be saved": lambda: nn.Sequential(nn.Flatten(), WithExtraState(64, 10)),
    "1.weight has no shape; run a batch through the model": lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(10)),
}


@pytest.mark.parametrize("reason", UNFIT)
def test_custom_model_that_does_not_fit_the_data_is_refused(reason):
    MODELS["own"] = lambda input_shape, num_classes: UNFIT[reason]()
    with pytest.raises(UserError, match=reason):
        assemble(load_config(QUICKSTART, [*SMALL, "model={name: own}"]))


@pytest.mark.parametrize("cohort", [[99], [0, 0, 1], [1, 0], [-1, 2]])
def test_custom_sampler_with_an_invalid_cohort_is_refused(cohort):
    sampler = UniformSampler(20, 4, 0)
    sampler.invite = lambda round: cohort
    with pytest.raises(UserError, match=f"the sampler uniform invites {re.escape(str(cohort))} in round 3; a list"):
        sampler.cohort(3)


def test_example_design_has_the_inclusion_frequencies():
    import_parts(["examples.own_draws"])
    wanted = np.array([0.9, 0.6, 0.3, 0.2, 1.0, 0.0])
    drawn = draw_terms(wanted, design="random_order", rng=np.random.default_rng(0), size=4000)
    assert drawn.shape == (4000, 3)
    frequencies = np.bincount(drawn.ravel(), minlength=6) / 4000
    assert np.abs(frequencies - wanted).max() < 4 * 0.5 / 4000**0.5  # four standard errors
    assert (np.diff(drawn, axis=1) > 0).all()


@pytest.mark.parametrize("start", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_custom_loss_and_optimizer_train_in_processes(start, monkeypatch):
    monkeypatch.setattr(processes, "start_method", lambda: start)
    import_parts(["examples.own_training"])
    own = ["plugins=[examples.own_training]", "local.loss=smoothed", "local.optimizer={name: sign_sgd, lr: 0.0003}"]
    experiment = assemble(load_config(QUICKSTART, [*TINY, *own, "engine=processes"]))
    plan = experiment.plan(experiment.sampler.cohort(0), 0)
    experiment.start()
    try:
        updates = dict(experiment.engine.train(plan, 0, 0.01))
    finally:
        experiment.close()
    for client, update in SequentialEngine(experiment.job).train(plan, 0, 0.01):
        assert updates[client].failure is None
        assert torch.equal(updates[client].loss, update.loss)


def test_schedules_equal_their_formulas():
    assert [SCHEDULES["constant"](0.1, t, 4) for t in (0, 3)] == [0.1, 0.1]
    assert [round(SCHEDULES["cosine"](1.0, t, 4), 3) for t in range(4)] == [1.0, 0.854, 0.5, 0.146]
    assert [SCHEDULES["inverse"](0.1, t, 4) for t in (0, 1, 9)] == [0.1, 0.05, 0.01]


def test_run_that_reached_its_target_is_finished(tmp_path):
    words = ["strategy=collective", "rounds=9", "evaluate_every=2", "target_accuracy=0.01", f"output={tmp_path}"]
    config = load_config(QUICKSTART, [*TWENTY_CLIENTS, *words])
    assert not is_finished(config)
    lines = read(run(config))
    assert "has reached target_accuracy=0.01" in lines[1]["stopped"]
    assert read_layers(tmp_path).keys() == {0, 1}
    assert is_finished(config)
    (tmp_path / MODEL_FILE).unlink()
    run(config, resume=True)
    assert read(tmp_path) == lines
    assert is_finished(config)


def test_settings_in_name_has_the_overrides():
    (cell,) = grid_configs(QUICKSTART, ["local.optimizer.lr=0.05"], ["top_n"], None, ["rounds=3"])
    assert settings_in_name(cell) == "lr=0.05,rounds=3"
    assert settings_in_name(with_directory(load_config(QUICKSTART, ["rounds=3"]), ["rounds=3"])) == "rounds=3"
    assert settings_in_name(load_config(QUICKSTART, ["output=own"])) == ""


def test_run_directory_is_named_after_the_overrides():
    def directory(*overrides):
        return with_directory(load_config(QUICKSTART, overrides), overrides).directory.as_posix()

    assert directory() == "runs/quickstart-collective-0"
    untold = ("engine=sequential", "evaluate_every=2", "tracker={name: wandb, tags: [a]}")
    assert directory("seed=3", "strategy=dense", *untold) == "runs/quickstart-dense-3"
    assert directory("data.root=here", "data.download=true", "data=mnist") == "runs/quickstart-collective-data=mnist-0"
    assert directory("model.width=8", "local.optimizer.lr=0.05") == "runs/quickstart-collective-lr=0.05,width=8-0"
    assert directory("local.optimizer.lr=0.05", "output=here") == "here"
    names = {directory(f"keep_ratio={ratio}") for ratio in ("0.1", "{0.1: 1}", "{0.2: 1}", "{ 0.2: 1}")}
    assert len(names) == 4
    assert all(re.fullmatch(r"[\w/,.=~-]+", name) for name in names)
    config, many = load_config(QUICKSTART), [f"local.key{index}=" + "x" * 9 for index in range(20)]
    long, other = describe(config, many), describe(config, [*many[:-1], "local.key19=y"])
    assert long != other
    assert len(long) <= 60
    assert long.startswith("local.key0=xxxxxxxxx,local.key1=xxxxxxxxx,"), "the first keys stay legible"
    assert re.fullmatch("[0-9a-f]{8}", describe(config, ["local.key=" + "x" * 99]))


SAME_WORD = [
    ["local.optimizer.lr=0.1"],
    ["server_optimizer.lr=0.1"],
    ["local.optimizer.lr=0.1", "server_optimizer.lr=0.2"],
    ["local.optimizer.lr=0.2", "server_optimizer.lr=0.1"],
    ["local.optimizer.weight_decay=0.1", "server_optimizer=sgd"],
    ["server_optimizer.weight_decay=0.1", "server_optimizer=sgd"],
    ["data=synthetic", "data.alpha=3"],
    ["data=synthetic", "data.partition.alpha=3"],
]


def test_run_directories_of_keys_with_the_same_last_word_differ():
    names = [with_directory(load_config(QUICKSTART, words), words).directory.name for words in SAME_WORD]
    assert len({*names}) == len(SAME_WORD)
    assert names[0] == "quickstart-collective-lr=0.1-0"
    assert names[1] == "quickstart-collective-server_optimizer.lr=0.1-0"


def test_expand_of_a_grid_has_every_point():
    assert expand(["local.optimizer.lr=0.03,0.1", "keep_ratio={0.2: 0.5, 0.4: 0.5},0.3"]) == [
        (f"local.optimizer.lr={lr}", f"keep_ratio={ratio}")
        for lr in ("0.03", "0.1")
        for ratio in ("{0.2: 0.5, 0.4: 0.5}", "0.3")
    ]
    assert expand([]) == [()]
    for wrong in ("local.optimizer.lr", "=3", "local.optimizer.lr=1,,2"):
        with pytest.raises(UserError, match="grid"):
            expand([wrong])


def test_grid_over_strategies_and_seeds_has_a_directory_each():
    cells = grid_configs(QUICKSTART, [], [], None, ["strategy=dense,top_n", "seed=3,4"])
    assert [cell.directory.name for cell in cells] == ["dense-3", "dense-4", "top_n-3", "top_n-4"]
    assert [(cell.strategy, cell.seed) for cell in cells[1:3]] == [("dense", 4), ("top_n", 3)]
    assert [cell.directory.name for cell in grid_configs(QUICKSTART, [], [], [3, 4])] == [
        "collective-3",
        "collective-4",
    ]
    with pytest.raises(UserError, match="nothing to compare"):
        grid_configs(QUICKSTART, [], [], None)


@pytest.mark.parametrize(
    ("allocate", "told"),
    [
        (lambda group: Allocation(np.ones(2), np.ones(2)), "π has shape"),
        (lambda group: Allocation(np.full(32, 14 / 32), np.ones(32)), "the π sum to 14"),
        (lambda group: Allocation(np.full(32, group.num_terms / 32), np.ones(3)), "ω has shape"),
        (lambda group: Allocation(np.full(32, group.num_terms / 32), -np.ones(32)), "above 0"),
        (lambda group: Allocation(np.full(32, group.num_terms / 32), np.full(32, np.nan)), "above 0"),
    ],
)
def test_custom_strategy_with_an_invalid_allocation_raises(allocate, told):
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(3)))
    with pytest.raises(UserError, match=f"layer 1: .*{told}"):
        ShardPlanner(Strategy("ours", allocate)).plan(model, {0: 0.2})
    assert "ours" not in STRATEGIES, "a planner takes a strategy as it is"


@pytest.mark.parametrize(
    ("split", "told"),
    [
        (lambda parts: parts[:-1], "returns 9 clients, and clients.count is 10"),
        (lambda parts: [*parts, parts[0]], "returns 11 clients"),
        (lambda parts: [parts[0] + 10**6, *parts[1:]], "there are 0 to"),
        (lambda parts: [parts[0] / 2, *parts[1:]], "gives a client .*; an array of indices is needed"),
        (lambda parts: [None, *parts[1:]], "gives a client None; an array of indices is needed"),
        (lambda parts: [parts[0][:, None], *parts[1:]], "an array of indices is needed"),
    ],
)
def test_custom_partition_that_is_invalid_raises(monkeypatch, split, told):
    iid = PARTITIONS["iid"]
    monkeypatch.setitem(PARTITIONS, "own", lambda dataset, count, rng: split(iid(dataset, count, rng)))
    with pytest.raises(UserError, match=told):
        assemble(load_config(QUICKSTART, [*TINY, "clients.count=10", "data.partition=own"]))
