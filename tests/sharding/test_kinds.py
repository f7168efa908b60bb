"""Every kind of layer against its dense form, in float64: computed, merged, planned, averaged."""

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from sharding import FactorizedLayer, FactorizedLinear, Shard, ShardPlanner, client_model, factorize, merge, train_shard
from sharding.layers import as_blocks, factorized_type, num_blocks
from sharding.layers.decomposition import form_of
from sharding.layers.embedding import FactorizedEmbedding
from tests.sharding.models import aggregate, unchanged

TOLERANCE = {"rtol": 0, "atol": 1e-10}


FORMATS = {"float32": 1e-6, "bfloat16": 0.02, "int8": 0.02, "int4": 0.4}  # with the largest error of an output


class Conv1D(nn.Module):
    """As transformers has it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)


class Marked(nn.Linear):
    """A subclass with an `__init__` of its own, but the forward that it inherits."""

    def __init__(self, width):
        super().__init__(width, width)


CASES = {
    "linear": (lambda: nn.Linear(6, 8), (4, 6)),
    "linear without a bias": (lambda: nn.Linear(9, 5, bias=False), (4, 2, 9)),
    "subclass": (lambda: Marked(6), (4, 6)),
    "transformers": (lambda: Conv1D(8, 6), (4, 3, 6)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    "conv1d reflect": (lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="reflect"), (2, 4, 9)),
    "conv2d of a point": (lambda: nn.Conv2d(3, 8, 1, bias=False), (2, 3, 9, 8)),
    "conv2d strided": (lambda: nn.Conv2d(3, 8, (3, 1), stride=(2, 1), padding=(1, 0)), (2, 3, 9, 8)),
    "conv2d dilated": (lambda: nn.Conv2d(3, 8, 3, stride=2, padding=2, dilation=2), (2, 3, 9, 8)),
    "conv2d same": (lambda: nn.Conv2d(3, 8, (3, 5), padding="same", dilation=(1, 2)), (2, 3, 9, 8)),
    "conv2d circular": (lambda: nn.Conv2d(3, 8, 3, padding=(2, 1), padding_mode="circular"), (2, 3, 9, 8)),
    "conv2d grouped": (lambda: nn.Conv2d(8, 12, 3, groups=4, padding="same"), (2, 8, 5, 6)),
    "conv2d without a batch": (lambda: nn.Conv2d(4, 6, 3, bias=False), (4, 5, 6)),
    "conv3d": (lambda: nn.Conv3d(3, 6, 2, dilation=2), (2, 3, 4, 5, 6)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 5)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(6, 4, (3, 2), stride=2, padding=1, output_padding=1), (2, 6, 4, 5)),
    "transposed 2d grouped": (lambda: nn.ConvTranspose2d(8, 6, 3, groups=2, bias=False, dilation=2), (2, 8, 4, 5)),
    "transposed padded": (lambda: nn.ConvTranspose2d(4, 6, 3, dilation=(3, 2), output_padding=(2, 0)), (2, 4, 5, 4)),
    "transposed 3d": (lambda: nn.ConvTranspose3d(4, 3, 2), (2, 4, 3, 3, 3)),
    "embedding": (lambda: nn.Embedding(9, 6, padding_idx=0), None),
}


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    make, shape = CASES[request.param]
    x = torch.randint(9, (3, 4)) if shape is None else torch.randn(shape, dtype=torch.float64)
    return make().double(), x


def factorized(layer, terms, residual=None):
    return factorized_type(layer).from_dense(layer, terms, residual)


def blocks(factor, layer):
    return factor.unflatten(0, (num_blocks(layer), -1))


@pytest.mark.parametrize("residual", [None, "int4"])
def test_layer_with_all_terms_or_a_residual_equals_the_dense_layer_and_gradients(case, residual):
    layer, x = case
    small = factorized(layer, 2 if residual else form_of(layer).rank, residual)
    dense = small.to_dense() if residual else layer
    y, z = (each.clone().requires_grad_(each.is_floating_point()) for each in (x, x))
    expected, actual = dense(y), small(z)
    torch.testing.assert_close(actual, expected, **TOLERANCE)
    probe = torch.randn_like(expected)
    (expected * probe).sum().backward()
    (actual * probe).sum().backward()
    if x.is_floating_point():
        torch.testing.assert_close(z.grad, y.grad, **TOLERANCE)
    gradient = as_blocks(dense.weight.grad, num_blocks(layer))
    for factor, expected in (
        (small.u, gradient @ blocks(small.v, layer)),
        (small.v, gradient.mT @ blocks(small.u, layer)),
    ):
        torch.testing.assert_close(factor.grad, expected.flatten(0, 1), **TOLERANCE)
    if getattr(layer, "bias", None) is not None:
        torch.testing.assert_close(small.bias.grad, dense.bias.grad, **TOLERANCE)
    assert "residual" not in dict(small.named_parameters())


@pytest.mark.parametrize("residual", FORMATS)
def test_layer_with_a_residual_equals_the_dense_layer_to_rounding(case, residual):
    layer, x = case
    small = factorized(layer, 2, residual)
    expected = layer(x)
    assert (small(x) - expected).abs().max() <= FORMATS[residual] * expected.abs().max()
    torch.testing.assert_close(small(x), small.to_dense()(x), **TOLERANCE)
    torch.testing.assert_close(small.weight, small.to_dense().weight.detach(), **TOLERANCE)


def test_layer_with_some_terms_equals_its_merged_layer(case):
    layer, x = case
    small = factorized(layer, 2)
    small.multipliers.copy_(torch.tensor([3.0, 0.5]))
    dense = small.to_dense()
    assert type(dense) is type(layer)
    assert repr(dense) == repr(layer)
    assert dense.state_dict().keys() == layer.state_dict().keys()
    torch.testing.assert_close(small(x), dense(x), **TOLERANCE)
    torch.testing.assert_close(small.weight, dense.weight.detach(), **TOLERANCE)
    best = torch.linalg.svd(as_blocks(layer.weight, num_blocks(layer)))
    omega = small.multipliers
    weight = (best.U[..., :2] * best.S[:, None, :2] * omega) @ best.Vh[:, :2]
    torch.testing.assert_close(weight.flatten(0, 1), dense.weight.flatten(1), **TOLERANCE)


def test_copies_and_symbolic_traces_of_a_layer_are_equal(case):
    layer, x = case
    small = factorized(layer, 2)
    copies = deepcopy(small), pickle.loads(pickle.dumps(small))
    assert [repr(copy.to_dense()) for copy in copies] == [repr(layer)] * 2
    for twin in (*copies, torch.fx.symbolic_trace(nn.Sequential(small))):
        assert torch.equal(twin(x), small(x))


def test_transposed_convolution_with_output_size_equals_dense():
    dense, x = nn.ConvTranspose2d(4, 3, 3, stride=2).double(), torch.randn(1, 4, 3, 3).double()
    torch.testing.assert_close(factorized(dense, 4)(x, [8, 8]), dense(x, [8, 8]), **TOLERANCE)


def test_round_with_any_kind_of_layer_trains_it(case):
    """A client has the structure alone and computes what the server does; what it does not train changes nothing."""
    layer, x = case
    model = nn.Sequential(layer)
    plan = ShardPlanner("full", skip=(), also="0").plan(model, {0: 1.0, 1: 1.0})
    assert plan.spectra.keys() == {"0"}
    structure, before = deepcopy(model).to("meta"), model(x)
    small = client_model(structure, Shard.from_bytes(plan.shard(0).to_bytes()))
    torch.testing.assert_close(small(x), before, **TOLERANCE)
    updates = {client: unchanged(sent) for client, sent in plan.shards()}
    assert aggregate(model, plan, updates, {0: 1, 1: 3}).accepted == [0, 1]
    torch.testing.assert_close(model(x), before, **TOLERANCE)
    update = train_shard(structure, plan.shard(0), [(x, x)], 0.1, loss=lambda y, _: y.square().mean())
    assert aggregate(model, plan, {0: update}, {0: 1}).accepted == [0]
    assert not torch.allclose(model(x), before)


def test_grouped_convolution_magnitudes_are_norms_over_groups():
    layer = nn.Conv2d(8, 12, 3, groups=4).double()
    plan = ShardPlanner("top_n", skip=()).plan(nn.Sequential(layer), {0: 0.5})
    singular = torch.linalg.svdvals(layer.weight.view(4, 3, 18))
    magnitudes = plan.spectra["0"].magnitudes
    torch.testing.assert_close(magnitudes, singular.square().sum(dim=0).sqrt().detach(), **TOLERANCE)
    small = client_model(nn.Sequential(layer), plan.shard(0))[0]
    error = (small.to_dense().weight - layer.weight).square().sum()
    torch.testing.assert_close(error, magnitudes[2:].square().sum(), **TOLERANCE)


def test_linear_layer_with_a_groups_attribute_has_one_block():
    layer = nn.Linear(6, 8).double()
    layer.groups = 2
    x = torch.randn(3, 6).double()
    assert (num_blocks(layer), form_of(layer).rank) == (1, 6)
    torch.testing.assert_close(factorized(layer, 6)(x), layer(x), **TOLERANCE)


def test_embeddings_are_factorized_only_with_also():
    model = nn.Sequential(nn.Embedding(30, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.warns(UserWarning, match=r"Embedding\.weight"):
        assert type(factorize(model, 0.25)[0]) is nn.Embedding
    small = factorize(model, 0.25, also=nn.Embedding)
    assert isinstance(small[0], FactorizedEmbedding)
    assert [isinstance(part, FactorizedLayer) for part in small] == [True, True, True, False]
    assert small(torch.tensor([1, 2])).shape == (2, 8)
    assert repr(merge(small)) == repr(model)


def embedding_with_padding(words=10, width=16):
    """Its rank is less than its rows: a term of magnitude zero may be the padding's."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(words, width, padding_idx=0), nn.Linear(width, 3)).double()


IDS, LABELS = torch.tensor([1, 2, 0, 3]), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize("words", [10, 30])
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_embedding_padding_row_stays_zero_in_training(words, ratio):
    small = factorize(embedding_with_padding(words), ratio, skip=(), also="0")
    optimizer = torch.optim.SGD(small.parameters(), 0.5)
    before = small[0].weight.detach().clone()
    nn.functional.cross_entropy(small(IDS), LABELS).backward()
    optimizer.step()
    assert not torch.equal(small[0].weight, before)
    assert small[0](IDS)[2].eq(0).all()
    assert small[0].weight[0].eq(0).all()


@pytest.mark.parametrize("strategy", ["full", "collective", "prism"])
def test_embedding_padding_row_stays_zero_at_the_server(strategy):
    server = embedding_with_padding()
    plan = ShardPlanner(strategy, skip=(), also="0").plan(server, {0: 0.5, 1: 0.5})
    updates = {client: train_shard(server, shard, [(IDS, LABELS)], 0.5) for client, shard in plan.shards()}
    before = server[0].weight.detach().clone()
    assert aggregate(server, plan, updates, {0: 1, 1: 2}).accepted == [0, 1]
    assert not torch.equal(server[0].weight, before)
    assert server[0].weight[0].eq(0).all()


def test_multipliers_are_buffers_in_the_state_dict():
    layer = FactorizedLinear.from_dense(nn.Linear(4, 3), 2)
    assert set(layer.state_dict()) == {"u", "v", "bias", "multipliers"}
    assert "multipliers" not in dict(layer.named_parameters())


def test_merge_in_bfloat16_has_only_rounding_error():
    layer = nn.Linear(64, 64, dtype=torch.bfloat16)
    merged = FactorizedLinear.from_dense(layer, 64).to_dense()
    # Each factor is rounded to bfloat16 once (2⁻⁹ relative); the sum over terms adds nothing visible to that.
    error = torch.linalg.norm((merged.weight - layer.weight).double()) / torch.linalg.norm(layer.weight.double())
    assert error < 2**-8
