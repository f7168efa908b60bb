"""The guide's app of ten lines, with a configuration's model, data and loop, trains what a federation trains."""

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from sharding import ShardPlanner, recipes
from tests.sharding.flower.grid import StubGrid
from tests.train.federate.nodes import Nodes
from train.engines.local_training import train_locally
from train.experiment.assembly import assemble, make_model, partition_dataset, read_dataset
from train.federate.roster import Timeouts
from train.federate.server_app import assemble_over
from train.run import run

pytestmark = pytest.mark.usefixtures("flower_identity", "no_waiting")

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "flower_app.md"
# What the strategy does not do: it has no schedule and samples all nodes. The rest is the recipe.
SETTINGS = ["recipe=tuned", "local.schedule=constant", "aggregation.max_share=1", "clients.per_round=4"]


def task_module(config, keep_ratios):
    """Return the app's `digits.task`: the model, the data and the training loop that the configuration names."""
    dataset, local, task = read_dataset(config), config.local, ModuleType("digits.task")
    shares = partition_dataset(config, dataset)

    def fit(model, values, data):
        client, split = data
        key = config.seed, values["server-round"] - 1, client
        loss = train_locally(model, split, dataset, local, local.optimizer.options["lr"], values["clip"], key)
        return {"num-examples": len(split), "train_loss": float(loss)}

    task.make_model, task.KEEP_RATIOS = partial(make_model, config, dataset), keep_ratios
    task.load_data, task.fit = lambda client: (client, shares[client]), fit
    return task


def noted(made, make, *arguments):
    made.append(make(*arguments))
    return made[-1]


@pytest.mark.parametrize("overrides", [[], ["data.partition=power_law", "compression=int8"]])
def test_app_of_the_guide_has_the_bits_of_a_federation(config, monkeypatch, caplog, overrides):
    ours, made = config(*SETTINGS, *overrides), []
    ratios = assemble(ours).clients.keep_ratios
    nodes = {100 + client: {"partition-id": client, "keep-ratio": ratio} for client, ratio in ratios.items()}
    run(ours, build=partial(assemble_over, grid=Nodes(nodes), timeouts=Timeouts(0.5, 0.5)))

    monkeypatch.setitem(sys.modules, "digits", ModuleType("digits"))
    monkeypatch.setitem(sys.modules, "digits.task", task_module(ours, ratios))
    monkeypatch.setattr(recipes, "ShardPlanner", partial(ShardPlanner, compression=ours.compression))
    monkeypatch.setattr(recipes, "tuned", partial(noted, made, recipes.tuned))
    server, client = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.S)
    assert "num_rounds=10" in server
    exec(server.replace("num_rounds=10", "num_rounds=2"), here := {})
    exec(client, there := {})
    here["app"](StubGrid(there["app"], nodes), Context(1, 1, {}, RecordDict(), {}))
    trained, state = load_file(ours.directory / "model.safetensors"), made[0].result.state_dict()
    assert trained.keys() == state.keys()
    assert all(torch.equal(trained[name], state[name]) for name in state)
    assert "left out of round" not in caplog.text
