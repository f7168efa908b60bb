"""Truncation by activations, against SVD-LLM's whitening and against other matrices of the same rank."""

import pytest
import torch
from torch import nn

from sharding import UserError, factorize
from sharding.factorization.calibration import observe
from sharding.layers import as_blocks, factorized_type, num_blocks
from tests.sharding.test_kinds import CASES, Conv1D

AFFINE = {name: case for name, case in CASES.items() if not name.startswith(("transposed", "embedding"))}


def batches_for(shape, count=3, scale=True):
    """Inputs whose features differ in size and are correlated."""
    torch.manual_seed(1)
    mix = None
    for _ in range(count):
        x = torch.randn(shape, dtype=torch.float64)
        if mix is None:
            mix = torch.randn(shape[-1], shape[-1], dtype=torch.float64) * 0.7 ** torch.arange(shape[-1])
        yield x @ mix if scale else x


@torch.no_grad()
def output_error(layer, small, batches):
    return sum(float((layer(x) - small(x)).square().sum()) for x in batches)


@pytest.mark.parametrize("name", AFFINE)
def test_calibrated_terms_have_the_least_output_error(name):
    torch.manual_seed(0)
    make, shape = AFFINE[name]
    layer = make().double()
    kind, batches = factorized_type(layer), list(batches_for(shape))
    moment = observe(layer, {"": layer}, batches)[""]
    small, plain = kind.from_dense(layer, 2, moment=moment), kind.from_dense(layer, 2)
    best = output_error(layer, small, batches)
    assert best < 0.999 * output_error(layer, plain, batches)
    for size in (1e-3, 1e-1):
        for _ in range(5):
            other = kind.from_dense(layer, 2, moment=moment)
            other.u.data += size * torch.randn_like(other.u)
            other.v.data += size * torch.randn_like(other.v)
            assert output_error(layer, other, batches) > best * (1 - 1e-5)
    u, v = (factor.detach().unflatten(0, (num_blocks(layer), -1)) for factor in (small.u, small.v))
    for gram in (u.mT @ u, v.mT @ v):  # these are singular terms, in order
        torch.testing.assert_close(gram, torch.diag_embed(gram.diagonal(dim1=1, dim2=2)), rtol=0, atol=1e-9)
    torch.testing.assert_close(u.norm(dim=1), v.norm(dim=1))


@pytest.mark.parametrize("shape", [(12, 5), (5, 12)], ids=str)
@pytest.mark.parametrize("kind", [nn.Linear, lambda inputs, outputs: Conv1D(outputs, inputs)], ids=["linear", "conv1d"])
def test_calibrated_linear_equals_the_whitening_of_svd_llm(shape, kind):
    torch.manual_seed(0)
    layer, x = kind(*shape).double(), next(batches_for((50, shape[0])))
    weight = layer.weight.detach() if isinstance(layer, nn.Linear) else layer.weight.detach().mT
    root = torch.linalg.cholesky(x.mT @ x)
    u, s, v = torch.linalg.svd(weight @ root, full_matrices=False)
    expected = u[:, :2] * s[:2] @ v[:2] @ torch.linalg.inv(root)
    small = factorize(nn.Sequential(layer), 0.4, (), calibration=[x])[0]
    actual = small.matrix().detach() if isinstance(layer, nn.Linear) else small.matrix().detach().mT
    assert small.num_terms == 2
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_calibrated_embedding_weighs_rows_by_their_counts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4)).double()
    ids = torch.tensor([0, 0, 0, 0, 3, 3, 3, 5])
    small = factorize(model, 0.5, (), also="0", calibration=[ids])
    counts = ids.bincount(minlength=6).double()
    table = model[0].weight.detach()
    best = torch.linalg.svdvals(counts.sqrt()[:, None] * table)[2:].square().sum()
    error = (counts[:, None] * (table - small[0].weight.detach()).square()).sum()
    torch.testing.assert_close(error, best, rtol=1e-3, atol=0)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("transposed")])
def test_calibrated_transposed_convolution_has_the_least_error_by_position(name):
    torch.manual_seed(0)
    make, shape = CASES[name]
    layer, batches = make().double(), list(batches_for(shape))
    moment = observe(layer, {"": layer}, batches)[""]
    small = factorized_type(layer).from_dense(layer, 2, moment=moment)
    blocks = num_blocks(layer)
    x = torch.cat([batch.movedim(1, -1).flatten(0, -2) for batch in batches]).unflatten(1, (blocks, -1)).transpose(0, 1)
    products = x @ as_blocks(layer.weight.detach(), blocks)
    error = (products - x @ as_blocks(small.weight.detach(), blocks)).square().sum()
    best = torch.linalg.svdvals(products)[:, 2:].square().sum()
    torch.testing.assert_close(error, best, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "sample"),
    [(lambda: nn.Linear(4, 6), 4), (lambda: nn.Linear(6, 4), 6), (lambda: nn.Embedding(5, 4), None)],
    ids=["inputs", "outputs", "embedding"],
)
def test_calibration_with_single_samples_equals_that_with_a_batch(make, sample):
    torch.manual_seed(0)
    layer = make().double()
    batch = torch.tensor([0, 4, 4]) if sample is None else torch.randn(3, sample, dtype=torch.float64)
    single, together = (observe(layer, {"": layer}, inputs)[""] for inputs in (list(batch), [batch]))
    torch.testing.assert_close(single.sums, together.sums)


def test_calibration_observes_a_layer_called_by_keyword():
    class ByKeyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 5)

        def forward(self, x):
            return self.layer(input=x)

    model, x = ByKeyword(), torch.randn(7, 3)
    torch.testing.assert_close(observe(model, {"layer": model.layer}, [x])["layer"].sums[0], x.double().mT @ x.double())


def test_calibration_with_few_activations_is_near_plain_truncation():
    torch.manual_seed(0)
    layer = nn.Linear(8, 6).double()
    plain = factorize(nn.Sequential(layer), 0.5, ())
    unseen = factorize(nn.Sequential(layer), 0.5, (), calibration=[torch.zeros(3, 8, dtype=torch.float64)])
    torch.testing.assert_close(unseen[0].weight, plain[0].weight)
    x = torch.randn(1, 8, dtype=torch.float64)
    few = factorize(nn.Sequential(layer), 0.5, (), calibration=[x])  # one sample, three terms
    torch.testing.assert_close(few(x), layer(x), rtol=0, atol=1e-5)
    rest = layer.weight - few[0].weight
    assert rest.norm() < 1.5 * (layer.weight - plain[0].weight).norm()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 8, 3)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.fc = nn.Linear(8, 4)

    def forward(self, x, scale=1.0):
        x = self.second(self.norm(self.first(x)).relu()).flatten(2).mT
        return self.fc(self.attention(x, x, x, need_weights=False)[0].mean(1)) * scale


@pytest.mark.parametrize("inplace", [False, True])
def test_calibration_leaves_modes_statistics_and_hooks_unchanged(inplace):
    torch.manual_seed(0)
    net = Net()
    net.attention.eval()
    x, before = torch.randn(16, 1, 7, 7), {name: part.clone() for name, part in net.named_buffers()}
    small = factorize(net, 0.5, ["first", "fc"], inplace, calibration=[x, (x, None), {"x": x, "scale": 2.0}])
    assert len(small.factorize_report.layers) == 5
    assert (small.training, small.attention.training, small.norm.training) == (True, False, True)
    assert all(torch.equal(part, before[name]) for name, part in small.named_buffers() if name in before)
    assert not any(part._forward_hooks for part in small.modules())


def test_residual_with_calibration_restores_the_outputs():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20)), torch.randn(64, 20)
    small = factorize(net, 0.2, (), residual_format="float32", calibration=[x])
    torch.testing.assert_close(small(x), net(x), rtol=1e-5, atol=1e-5)


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
USELESS = {
    **{
        str(bad): (
            [X, X, torch.where(torch.arange(32).view(4, 8) == 0, bad, X)],
            "the outputs of layer 0 had NaN or Inf",
        )
        for bad in (float("nan"), float("inf"), -float("inf"))
    },
    "overflow": ([X.half() * 10], "the outputs of layer 1 had NaN or Inf in calibration; remove such batches"),
    "a dict": ({"input": X}, "calibration is one dict; pass a list of such"),
    "nothing": ([], r"calibration is \[\], which has no batches; pass some inputs of the model"),
}


@pytest.mark.parametrize(("batches", "message"), USELESS.values(), ids=USELESS)
def test_useless_calibration_raises_with_the_reason_and_changes_nothing(batches, message):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    net[1].weight.data.mul_(1e5)
    if "layer 1" in message:
        net.half()
    with pytest.raises(UserError, match=message):
        factorize(net, 0.25, (), inplace=True, calibration=batches)
    assert {type(layer) for layer in net} == {nn.Linear}
    assert not net[0]._forward_hooks
