"""Terms on top of a frozen residual: every kind of layer, in and out of models."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from sharding import (
    FactorizedLayer,
    UserError,
    export_lora,
    factorize,
    freeze_except_factors,
    load_factorized,
    merge,
    register_layer,
    save_factorized,
)
from sharding.layers import factorized_type, registry
from sharding.layers.registry import factorize_empty
from sharding.matrices.quantization import dequantize
from tests.sharding.models import KINDS
from tests.sharding.test_kinds import FORMATS, Conv1D


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(96, 128), (2, 96)), (nn.Conv1d(64, 64, 9), (1, 64, 12)), (Conv1D(88, 120), (2, 120))],
    ids=["linear", "conv", "transformers"],
)
def test_residual_layer_saves_no_dense_weight_for_backward(layer, shape):
    small, saved = factorized_type(layer).from_dense(layer, 2, "int4"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda part: saved.append(part) or part, lambda part: part):
        small(torch.randn(shape, requires_grad=True)).sum().backward()
    assert max(part.nbytes for part in saved) == small.residual.nbytes < layer.weight.nbytes / 6


class Net(nn.Module):
    """Packed attention, a fused projection, GPT-2's layer, a convolution and an embedding."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 12)
        self.mix = nn.Conv1d(12, 12, 3, padding=1)
        self.encoder = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True, dropout=0.0)
        self.qkv = nn.Linear(12, 36)
        self.back = Conv1D(12, 36)
        self.head = nn.Linear(12, 5)

    def forward(self, ids):
        x = self.mix(self.tokens(ids).mT).mT
        return self.head(self.back(self.qkv(self.encoder(x))))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


IDS = torch.arange(12).view(2, 6)


def make_small(net, residual_format="int4"):
    return factorize(net, 0.25, "head", also=nn.Embedding, residual_format=residual_format)


@pytest.mark.parametrize("residual", FORMATS)
def test_model_with_residuals_and_its_merge_equal_the_model(net, residual):
    small = make_small(net, residual)
    factorized = [part for part in small.modules() if isinstance(part, FactorizedLayer)]
    assert len(factorized) == 10
    error = (small(IDS) - net(IDS)).abs().max() / net(IDS).abs().max()
    assert error < FORMATS[residual]
    merged = merge(small)
    assert [type(part) for part in merged.modules()] == [type(part) for part in net.modules()]
    torch.testing.assert_close(merged(IDS), small(IDS), rtol=1e-5, atol=1e-5)
    assert "on top of a frozen residual of" in str(small.factorize_report)


@pytest.mark.parametrize(
    ("where", "residual"), [*((where, "int4") for where in KINDS), *(("skeleton", residual) for residual in FORMATS)]
)
def test_load_factorized_with_residuals_equals_the_saved_model(net, tmp_path, where, residual):
    small = make_small(net, residual)
    save_factorized(small, tmp_path / "a")
    loaded = load_factorized(tmp_path / "a", KINDS[where](Net))
    assert torch.equal(loaded(IDS), small(IDS))
    assert loaded.state_dict().keys() == small.state_dict().keys()
    size = sum(file.stat().st_size for file in (tmp_path / "a").iterdir())
    save_factorized(make_small(net, None), tmp_path / "b")
    frozen = sum(part.nbytes for name, part in small.named_buffers() if name.endswith("residual"))
    assert size - sum(file.stat().st_size for file in (tmp_path / "b").iterdir()) >= frozen


@pytest.mark.filterwarnings("ignore")
def test_export_lora_with_residuals_adds_the_change_to_the_dense_model(tmp_path):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 6)).double()
    start = freeze_except_factors(factorize(base, 0.25, skip=(), residual_format="int4"))
    later, x = deepcopy(start), torch.randn(5, 8, dtype=torch.float64)
    for part in (later[0], later[2]):
        part.u.data += torch.randn_like(part.u)
    export_lora(later, start, tmp_path / "a")
    adapted = peft.PeftModel.from_pretrained(deepcopy(base), tmp_path / "a").merge_and_unload()
    for at in (0, 2):
        change = later[at].weight - start[at].weight
        torch.testing.assert_close(adapted[at].weight, base[at].weight + change, rtol=0, atol=1e-9)
    on_residual = peft.PeftModel.from_pretrained(merge(start), tmp_path / "a")
    torch.testing.assert_close(on_residual(x), later(x), rtol=0, atol=1e-9)
    with pytest.raises(UserError, match="0 has a residual, which the start lacks; start from the factorized model"):
        export_lora(later, base, tmp_path / "b")
    start[2].residual[0, 0, -1] ^= 1
    with pytest.raises(UserError, match="2 has a residual, which the start lacks"):
        export_lora(later, start, tmp_path / "b")


def test_factorize_empty_with_a_residual_allocates_it_on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 32))
    layer = factorize_empty(model, {"0": 3}, {"0": "int4"})[0]
    assert layer.residual.is_meta
    assert layer.residual.shape == (32, 2, 18)
    assert factorize(nn.Sequential(nn.Linear(64, 32, device="meta")), 0.1, (), residual_format="int8")[
        0
    ].residual.is_meta


def test_residual_of_all_terms_is_zero():
    layer = nn.Linear(6, 6).double()
    small = factorize(nn.Sequential(layer), 1.0, (), residual_format="float32")[0]
    assert dequantize(small.residual, 6, torch.float64).abs().max() < 1e-15


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class FactorizedDoubled(FactorizedLayer):
    made_from = (Doubled,)

    def forward(self, x):
        return 2 * nn.functional.linear(x, self.weight, self.bias)


def test_residual_of_a_layer_that_does_not_add_it_raises(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    register_layer(Doubled, FactorizedDoubled)
    model, attention = nn.Sequential(Doubled(4, 4)), nn.MultiheadAttention(4, 2)
    assert isinstance(factorize(model, 0.25, ())[0], FactorizedDoubled)
    both = nn.Sequential(attention, *model)
    with pytest.raises(UserError, match="layer 1 cannot have a residual: the forward of FactorizedDoubled would"):
        factorize(both, 0.25, (), inplace=True, residual_format="int4")
    assert both[0] is attention
    FactorizedDoubled.adds_residual = True  # its forward uses the whole weight
    small, x = factorize(model, 0.25, (), residual_format="float32"), torch.randn(3, 4)
    torch.testing.assert_close(small(x), model(x))
