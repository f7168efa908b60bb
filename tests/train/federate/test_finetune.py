"""Fine-tuning on nodes: with tables of their own, and to the bits of a simulation."""

from functools import partial

import pytest

from tests.encoder import WORDS, write_encoder, write_table
from tests.train.federate.nodes import Nodes
from tests.train.runs import assert_same, read
from train.config.schema import load_config
from train.federate.roster import Timeouts
from train.federate.server_app import assemble_over
from train.run import run
from train.rundir.records import read_clients

pytest.importorskip("datasets")
pytestmark = pytest.mark.usefixtures("flower_identity", "no_waiting")


@pytest.fixture
def config(tmp_path):
    """Return a function that returns the guide's configuration for two nodes, on a small model."""
    weights = write_encoder(tmp_path / "weights", sum(WORDS.values(), ()))
    small = ["rounds=2", "clients.count=2", "clients.per_round=2", "local.steps=2", "evaluate_every=1"]
    words = [f"model.weights={weights}", *small, "engine=sequential", "checkpoint_every=1"]

    def make(*overrides, output):
        return load_config("configs/finetune.yaml", [*words, *overrides, f"output={tmp_path / output}"])

    return make


def train_over(config, nodes):
    return run(config, resume=True, build=partial(assemble_over, grid=nodes, timeouts=Timeouts(0.5, 0.5)))


def test_nodes_with_tables_of_their_own_are_sent_the_frozen_weights_once(config, tmp_path):
    """No node has all classes, and the server has none of the training texts."""
    for name in ("space", "sport"):
        write_table(tmp_path / f"{name}.csv", [name])
    write_table(tmp_path / "test.csv", ["space", "sport"], 4)
    nodes_own = ["data.train=null", "data.test_fraction=null", f"data.test={tmp_path / 'test.csv'}"]
    nodes = Nodes(
        {
            number: {"partition-id": number, "keep-ratio": ratio, "data": str(tmp_path / f"{name}.csv")}
            for number, (name, ratio) in enumerate((("space", 0.01), ("sport", 0.04)))
        }
    )
    first, second = read(train_over(config(*nodes_own, "data.classes=[space, sport]", output="run"), nodes))
    assert (first["num_aggregated"], second["num_aggregated"]) == (2, 2)
    assert (first["new_clients"], second.get("new_clients", [])) == ([0, 1], [])
    assert first["bytes_down"] > second["bytes_down"] > second["bytes_up"]  # the weak client's tail does not return


class Forgetful(Nodes):
    """Nodes that lose all that Flower keeps for them before each round but the first."""

    def get_node_ids(self):
        if len(self.sent) == 4:  # each node was asked once, and has trained once
            self.states.clear()
        return super().get_node_ids()


@pytest.mark.parametrize("kind", [Nodes, Forgetful])
def test_finetuning_on_nodes_has_the_bits_of_a_simulation(config, tmp_path, kind):
    write_table(tmp_path / "news.csv", ["space", "sport"])
    train = f"data.train={tmp_path / 'news.csv'}"
    alone = run(config(train, output="alone"))
    (clients,) = read_clients(alone).values()
    ratios = enumerate(clients["keep_ratios"])
    nodes = kind({number: {"partition-id": number, "keep-ratio": ratio} for number, ratio in ratios})
    assert_same(train_over(config(train, output="nodes"), nodes), alone)
