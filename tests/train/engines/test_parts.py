"""What the stacked engine is made of: convolutions, folded layers, choices by rule."""

import pytest
import torch
from torch import nn

from sharding import FactorizedConv2d, FactorizedLinear
from train.engines import choices as choices_module
from train.engines import convolution
from train.engines.choices import Choices, convolution_way, fastest
from train.engines.convolution import WAYS, Geometry, convolve
from train.engines.folding import NotFoldableError, fold

GEOMETRIES = [Geometry((1, 1), (1, 1), (1, 1)), Geometry((2, 1), (0, 2), (1, 2))]


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_each_clients_own_convolution(way, geometry):
    torch.manual_seed(0)
    x, filters = torch.randn(6, 4, 7, 9, requires_grad=True), torch.randn(3, 5, 4, 3, 2, requires_grad=True)
    expected = torch.cat([nn.functional.conv2d(x[2 * g : 2 * g + 2], filters[g], None, *geometry) for g in range(3)])
    y = WAYS[way](x, filters, geometry)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(y)
    for mine, theirs in zip(
        torch.autograd.grad((y * weights).sum(), (x, filters)),
        torch.autograd.grad((expected * weights).sum(), (x, filters)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(convolve(x, filters, geometry, Choices()), expected, rtol=1e-5, atol=1e-5)


SHAPES = {  # (B, in, H, W), (out, in, kh, kw), size -> way
    "few patches": ((8, 8, 8, 8), (4, 8, 3, 3), (8, 8), "unfolded"),
    "one channel": ((32, 1, 28, 28), (6, 1, 3, 3), (28, 28), "grouped"),
    "few patches of whole vectors": ((8, 32, 4, 4), (32, 32, 3, 3), (4, 4), "grouped"),
    "whole vectors": ((16, 16, 8, 8), (16, 16, 3, 3), (8, 8), "grouped"),
    "many patches": ((16, 16, 32, 32), (16, 16, 3, 3), (32, 32), "looped"),
    "odd channels": ((16, 16, 8, 8), (7, 16, 3, 3), (8, 8), "looped"),
}


@pytest.mark.parametrize(("batch", "filters", "size", "way"), SHAPES.values(), ids=SHAPES)
def test_the_way_of_a_convolution_follows_from_its_shapes(batch, filters, size, way):
    assert convolution_way(batch, filters, size, "cpu") == way
    choices, geometry = Choices(), Geometry((1, 1), (1, 1), (1, 1))
    for clients in (2, 3):  # the same, however many
        convolve(torch.randn(clients * batch[0], *batch[1:]), torch.randn(clients, *filters), geometry, choices)
    assert list(choices.convolutions.values()) == [way]


def test_a_choice_that_was_made_is_kept():
    x, filters, geometry = torch.randn(4, 1, 4, 4), torch.randn(2, 3, 1, 3, 3), Geometry((1, 1), (1, 1), (1, 1))
    choices = Choices()
    convolve(x, filters, geometry, choices)
    (subject,) = choices.convolutions
    asked = dict.fromkeys([subject], "no way")
    with pytest.raises(KeyError, match="no way"):
        convolve(x, filters, geometry, Choices(convolutions=asked))


def test_who_wants_it_has_the_ways_timed(monkeypatch):
    monkeypatch.setattr(convolution, "fastest", lambda ways: "looped")
    choices = Choices(timed=True)
    convolve(torch.randn(2, 1, 4, 4), torch.randn(2, 3, 1, 3, 3), GEOMETRIES[0], choices)
    assert list(choices.convolutions.values()) == ["looped"]


LAYERS = {
    "linear": (nn.Linear(4, 3), (5, 4)),
    "linear without bias": (nn.Linear(4, 3, bias=False), (4,)),
    "factorized linear": (FactorizedLinear(4, 6, 2), (5, 4)),
    "conv": (nn.Conv2d(3, 5, 3, stride=2, padding=1), (3, 6, 6)),
    "conv 1x1": (nn.Conv2d(3, 5, 1, stride=2, bias=False), (3, 6, 6)),
    "factorized conv": (FactorizedConv2d(3, 5, 3, 2, padding=1), (3, 6, 6)),
    "group norm": (nn.GroupNorm(2, 4), (4, 6, 6)),
    "layer norm": (nn.LayerNorm((3, 4)), (5, 3, 4)),
    "layer norm without bias": (nn.LayerNorm(4, bias=False), (4,)),
    "norms without anything": (nn.Sequential(nn.LayerNorm(4, elementwise_affine=False)), (5, 4)),
}


@pytest.mark.parametrize(("layer", "shape"), LAYERS.values(), ids=LAYERS)
def test_a_folded_layer_is_each_clients_own(layer, shape):
    torch.manual_seed(0)
    folded, state = fold(nn.Sequential(layer), 3, Choices())
    assert state.keys() == nn.Sequential(layer).state_dict().keys()
    with torch.no_grad():
        for tensor in state.values():
            tensor.normal_()
    x = torch.randn(6, *shape)
    y = folded(x)
    for g in range(3):
        alone = nn.Sequential(layer)
        alone.load_state_dict({name: tensor[g] for name, tensor in state.items()})
        torch.testing.assert_close(y[2 * g : 2 * g + 2], alone(x[2 * g : 2 * g + 2]), rtol=1e-5, atol=1e-5)


def test_folded_embeddings_read_their_own_table_and_refuse_other_ids():
    folded, state = fold(nn.Sequential(nn.Embedding(5, 2)), 3, Choices())
    with torch.no_grad():
        state["0.weight"].normal_()
    ids = torch.randint(5, (6, 4))
    for g in range(3):
        assert torch.equal(folded(ids)[2 * g : 2 * g + 2], state["0.weight"][g][ids[2 * g : 2 * g + 2]])
    with pytest.raises(IndexError):
        folded(ids + 5)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(1, 1, 3, padding="same"), nn.Embedding(3, 2, padding_idx=0)],
    ids=["groups", "same", "padding_idx"],
)
def test_what_cannot_be_folded_is_refused(layer):
    with pytest.raises(NotFoldableError):
        fold(nn.Sequential(layer), 2, Choices())


def test_a_way_must_save_the_margin_to_be_taken_instead_of_the_first(monkeypatch):
    def choose(seconds, margin):
        monkeypatch.setattr(choices_module, "measure", lambda ways: seconds)
        return fastest({}, margin)

    assert choose({"first": 1.0, "second": 0.89, "third": 2.0}, margin=0.1) == "second"
    assert choose({"first": 1.0, "second": 0.91}, margin=0.1) == "first"
    assert choose({"first": 1.0, "second": 0.99}, margin=0.0) == "second"
    assert choose({"first": 1.0, "second": 1.0}, margin=0.0) == "first"
