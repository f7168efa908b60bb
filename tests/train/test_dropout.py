"""Keyed dropout: the rate, independence, and that nothing but its key matters."""

import pytest
import torch
from timm.layers.drop import DropPath
from torch import nn

from train.engines.dropout import Masks, key_dropout, sample_seeds

KEY = (0, 3, 7)


def masks_of(seeds, shape=(40, 50), rate=0.3, calls=1):
    masks = Masks()
    masks.begin(seeds)
    return [masks.keep(shape, rate) for _ in range(calls)]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_a_share_of_the_elements_is_dropped(rate):
    (kept,) = masks_of(sample_seeds(5, 20, KEY).flatten(), rate=rate)
    count = kept.numel()
    assert abs(count - kept.sum().item() - rate * count) <= 5 * (rate * (1 - rate) * count) ** 0.5


def test_samples_steps_calls_and_neighbors_are_uncorrelated():
    first, second = masks_of(sample_seeds(2, 32, KEY).flatten(), rate=0.5, calls=2)
    signs = [2.0 * mask.double() - 1 for mask in (first, second)]
    pairs = {
        "calls": (signs[0], signs[1]),
        "samples": (signs[0][1:], signs[0][:-1]),
        "steps": (signs[0][32:], signs[0][:32]),
        "columns": (signs[0][:, :, 1:], signs[0][:, :, :-1]),
        "rows": (signs[0][:, 1:], signs[0][:, :-1]),
    }
    for name, (one, other) in pairs.items():
        assert abs((one * other).mean().item()) < 5 / one.numel() ** 0.5, name


def test_seeds_depend_on_the_place_and_not_on_padding_or_on_later_steps():
    short, long = sample_seeds(2, 4, KEY), sample_seeds(5, 9, KEY)
    assert torch.equal(short, long[:2, :4])
    assert len(set(long.flatten().tolist())) == long.numel()
    assert not set(long.flatten().tolist()) & set(sample_seeds(5, 9, (0, 3, 8)).flatten().tolist())


def test_a_sample_has_its_mask_whoever_is_beside_it():
    seeds = sample_seeds(1, 6, KEY)[0]
    (together,), (alone,) = masks_of(seeds), masks_of(seeds[4:5])
    assert torch.equal(together[4], alone[0])


def test_a_tensor_whose_first_axis_is_not_the_samples_has_a_mask_too():
    model = nn.Sequential(nn.Dropout(0.5))
    masks, x = key_dropout(model), torch.ones(5, 7, 9)
    outputs = []
    for _ in range(2):
        masks.begin(sample_seeds(1, 7, KEY)[0])
        outputs.append(model(x))
    assert torch.equal(*outputs)
    assert set(outputs[0].unique().tolist()) == {0.0, 2.0}


def test_dropouts_are_replaced_once_and_act_only_in_training():
    shared = nn.Dropout(0.5)
    model = nn.Sequential(shared, nn.Sequential(shared, DropPath(0.5)), nn.Dropout(0.0))
    masks = key_dropout(model)
    assert key_dropout(model) is masks
    assert model[0] is model[1][0]
    x = torch.ones(64, 8)
    assert torch.equal(model.eval()(x), x)
    state = torch.get_rng_state()
    masks.begin(sample_seeds(1, 64, KEY)[0])
    first = model.train()(x)
    masks.begin(sample_seeds(1, 64, KEY)[0])
    assert torch.equal(model(x), first)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(first.unique().tolist()) == {0.0, 8.0}
    whole = nn.Sequential(DropPath(0.5))
    key_dropout(whole).begin(sample_seeds(1, 64, KEY)[0])
    rows = whole(x)
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    assert 0 < rows.count_nonzero() < rows.numel()
