"""Local training against its loop written out by hand."""

import pytest
import torch
from torch import nn

from sharding import FactorizedLinear, clip_and_decay
from sharding.rng import generator
from train.config.sections import LocalConfig
from train.data import Dataset, Split
from train.data.dataset import unchanged
from train.engines.local_training import draw_passes, make_optimizer, train_locally
from train.experiment.evaluation import evaluate
from train.registries import cross_entropy

CLIP, DECAY, LR, MOMENTUM = 2.0, 0.7, 0.1, 0.9
SGD = {"name": "sgd", "lr": LR, "momentum": MOMENTUM}


def make_data(samples=7, seed=0):
    torch.manual_seed(seed)
    split = Split(torch.randn(samples, 4), torch.randint(3, (samples,)))
    return Dataset("toy", split, split, 3, (4,), unchanged)


def make_model():
    torch.manual_seed(1)
    model = nn.Sequential(FactorizedLinear.from_dense(nn.Linear(4, 5), 2), nn.Tanh(), nn.Linear(5, 3))
    model[0].multipliers.copy_(torch.tensor([1.5, 8.0]))
    return model


def batches_by_hand(rng, samples, local):
    """Yield the rows of each batch: each epoch in an order of its own, or drawn with replacement."""
    if local.steps:
        yield from torch.from_numpy(rng.integers(samples, size=(local.steps, local.batch_size)))
    else:
        for _ in range(local.epochs):
            yield from torch.from_numpy(rng.permutation(samples)).split(local.batch_size)


def train_by_hand(model, data, local):
    """Step through the batches with torch's optimizer."""
    losses, optimizer = [], torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    optimizer.register_step_pre_hook(clip_and_decay(model, CLIP, DECAY, local.decay_of))
    for rows in batches_by_hand(generator("batches", 0, 0, 0), len(data.train), local):
        losses.append(nn.functional.cross_entropy(model(data.train.inputs[rows]), data.train.targets[rows]))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return sum(loss.item() for loss in losses) / len(losses)


@pytest.mark.parametrize("options", [{"epochs": 2}, {"epochs": 2, "decay_of": "effective"}, {"steps": 5}], ids=str)
def test_local_training_equals_clipped_decayed_sgd_with_momentum(options):
    data, model, expected = make_data(), make_model(), make_model()
    local = LocalConfig(batch_size=3, optimizer=SGD, decay=DECAY, **options)
    loss = train_locally(model, data.train, data, local, LR, CLIP, key=(0, 0, 0))
    assert abs(loss.item() - train_by_hand(expected, data, local)) < 1e-6
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)
    assert model[0].multipliers.tolist() == [1.5, 8.0]


@pytest.mark.parametrize(("options", "fused"), [({}, True), ({"foreach": True}, None), ({"fused": False}, False)])
def test_optimizer_is_fused_unless_an_option_excludes_it(options, fused):
    optimizer = make_optimizer(nn.Linear(4, 3), LocalConfig(optimizer=SGD | options), LR)
    assert optimizer.defaults["fused"] is fused


def test_local_training_with_the_same_key_is_equal():
    data = make_data()

    def trained(key, state):
        model = nn.Sequential(make_model(), nn.Dropout(0.5))
        torch.manual_seed(state)
        train_locally(model, data.train, data, LocalConfig(batch_size=3, optimizer=SGD), LR, None, key)
        return model[0][2].weight

    assert torch.equal(trained((0, 1, 2), 0), trained((0, 1, 2), 1))
    assert not torch.equal(trained((0, 1, 2), 0), trained((0, 1, 3), 0))
    model = make_model()
    before = torch.get_rng_state()
    train_locally(model, data.train, data, LocalConfig(optimizer=SGD), LR, None, (0, 0, 0))
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_counts_all_batches_without_ignored_targets():
    torch.manual_seed(0)
    logits, targets = torch.randn(10, 6, 3), torch.randint(3, (10, 6))
    split = Split(logits, targets)
    data = Dataset("toy", split, split, 3, (6, 3), unchanged, ignore_index=0)
    accuracy, loss = evaluate(nn.Identity(), data, split, batch_size=4)
    counted = targets != 0
    hits = (logits.argmax(-1) == targets) & counted
    assert accuracy == hits.sum().item() / counted.sum().item()
    expected = nn.functional.cross_entropy(logits[counted], targets[counted])
    assert abs(loss - expected.item()) < 1e-6
    torch.testing.assert_close(cross_entropy(logits, targets, 0), expected)


@pytest.mark.parametrize(("length", "classes", "rows"), [(1, 200, 512), (128, 50_000, 10), (4096, 100_000, 1)])
def test_evaluation_batch_has_no_more_logits_than_256_mb_hold(length, classes, rows):
    ids = torch.zeros(600, length, dtype=torch.int64)
    data, sizes = Split(ids, ids), []

    class Stop(nn.Module):
        def forward(self, batch):
            sizes.append(len(batch))
            raise StopIteration

    with pytest.raises(StopIteration):
        evaluate(Stop(), Dataset("toy", data, data, classes, (length,), unchanged), data)
    assert sizes == [rows]


def test_local_steps_draw_equally_many_samples_of_clients_of_any_size():
    data = make_data(samples=7)
    local = LocalConfig(steps=5, batch_size=3, optimizer=SGD)
    for owner in (data.train, Split(data.train.inputs[:2], data.train.targets[:2])):
        assert len(draw_passes(owner, data, local, (0, 0, 0))) == 5 * 3
