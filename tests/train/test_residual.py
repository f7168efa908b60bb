"""Runs on top of a frozen residual: who trains, bytes of the first contact, and the model that is saved."""

import pytest
import torch
from torch import nn

from sharding import UserError
from tests.train.runs import TINY, read, tiny
from train import load_model
from train.callbacks.saving import states_of
from train.experiment.assembly import assemble
from train.run import run
from train.rundir.checkpoint import Checkpoint
from train.rundir.file_names import CHECKPOINT_FILE

ON_INT4 = [*TINY, "residual=int4", "strategy=top_n", "keep_ratio=0.2", "rounds=4", "checkpoint_every=1"]


def test_clients_of_unequal_keep_ratios_all_train_on_a_residual(tmp_path):
    words = ["keep_ratio={0.2: 0.5, 0.5: 0.5}", "clients.per_round=4"]
    lines = read(run(tiny(tmp_path, *words, shared=[word for word in ON_INT4 if "keep_ratio" not in word])))
    assert all(line["num_aggregated"] == line["num_clients"] == 4 for line in lines)


def test_bytes_of_a_run_on_a_residual_count_each_client_once(tmp_path):
    config = tiny(tmp_path / "run", shared=ON_INT4)
    experiment = assemble(config)
    assert experiment.residual_nbytes == len(experiment.server.frozen.to_bytes())
    seen = set()
    for t, line in enumerate(read(run(config))):
        plan = experiment.plan(experiment.sampler.cohort(t), t)
        new = [client for client in plan if client not in seen]
        seen.update(new)
        assert line.get("new_clients", []) == new
        assert line["bytes_down"] == plan.nbytes + experiment.residual_nbytes * len(new)
        assert line["bytes_dense"] == experiment.dense_nbytes


def test_loaded_model_of_a_run_on_a_residual_is_dense_and_computes_the_same(tmp_path):
    config = tiny(tmp_path / "run", "result=last", shared=ON_INT4)
    loaded, experiment, x = load_model(run(config)), assemble(config), torch.rand(3, 1, 8, 8)
    Checkpoint.read(config.directory / CHECKPOINT_FILE).restore(experiment.model, states_of([experiment]))
    assert {type(layer) for layer in loaded.modules() if not list(layer.children())} == {nn.Flatten, nn.Linear, nn.ReLU}
    torch.testing.assert_close(loaded(x), experiment.model.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("init=as_built", "residual=int4 needs init=low_rank, which leaves one; init is as_built"),
        ("strategy=dense", "residual=int4 needs a strategy with terms; dense has none"),
        ("alignment=true", "alignment=true trains the whole model, and residual=… freezes most of it"),
        ("residual=int3", "residual"),
    ],
)
def test_residual_with_what_excludes_it_raises(tmp_path, override, message):
    with pytest.raises(UserError, match=message):
        tiny(tmp_path, override, shared=ON_INT4)
