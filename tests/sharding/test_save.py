"""Factorized models in folders, and as adapters."""

import json
from copy import deepcopy

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sharding import UserError, export_lora, factorize, freeze_except_factors, load_factorized, merge, save_factorized
from tests.sharding.models import KINDS


class Net(nn.Module):
    """Tied weights, packed attention, buffers, convolutions."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 12)
        self.mix = nn.Conv1d(12, 12, 3, padding=1)
        self.norm = nn.BatchNorm1d(12)
        self.encoder = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True, dropout=0.0)
        self.qkv = nn.Linear(12, 36)
        self.back = nn.Linear(36, 12)
        self.head = nn.Linear(12, 30, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.norm(self.mix(self.tokens(ids).mT)).mT
        return self.head(self.back(self.qkv(self.encoder(x))))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


IDS = torch.arange(12).view(2, 6)


def make_small(net):
    return factorize(net, 0.25, skip="mix")


@pytest.mark.parametrize("where", KINDS)
def test_load_factorized_into_any_structure_equals_the_saved_model(net, tmp_path, where):
    small = make_small(net)
    for parameter in small.parameters():
        parameter.data.add_(0.01 * torch.randn_like(parameter))
    small.norm(torch.randn(5, 12))  # running statistics move
    save_factorized(small, tmp_path / "model")
    empty = KINDS[where](Net)
    loaded = load_factorized(tmp_path / "model", empty)
    assert loaded.head.weight is loaded.tokens.weight
    assert repr(loaded) == repr(small)
    torch.testing.assert_close(loaded.eval()(IDS), small.eval()(IDS), rtol=0, atol=0)
    torch.testing.assert_close(merge(loaded)(IDS), merge(small)(IDS), rtol=0, atol=0)
    assert isinstance(empty.qkv, nn.Linear)


def test_load_factorized_into_another_model_reports_all_misfits(net, tmp_path):
    save_factorized(make_small(net), tmp_path)

    class Other(Net):
        def __init__(self):
            super().__init__()
            self.back = nn.Linear(36, 12, bias=False)
            self.norm = nn.BatchNorm1d(24, affine=False)
            self.more = nn.Parameter(torch.zeros(2))

    with pytest.raises(UserError) as caught:
        load_factorized(tmp_path, Other())
    message = str(caught.value)
    for problem in (
        "more is not in the folder",
        "back.bias is not in the model",
        "norm.weight is not in the model",
        "norm.running_mean has shape [12] in the folder, [24] in the model",
    ):
        assert problem in message


def test_load_and_save_with_an_unsuitable_folder_raise(net, tmp_path):
    with pytest.raises(UserError, match="holds no factorized model"):
        load_factorized(tmp_path, net)
    save_factorized(make_small(net), tmp_path)
    with pytest.raises(UserError, match="holds a model already"):
        save_factorized(make_small(net), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(UserError, match="holds no factorized model"):
        load_factorized(tmp_path, net)
    (tmp_path / "file").write_text("mine")
    small = factorize(plain(), 0.25)
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(UserError, match=r"cannot be a folder: .*; choose another one"):
            save_factorized(make_small(net), folder)
        with pytest.raises(UserError, match=r"cannot be a folder: .*; choose another one"):
            export_lora(small, small, folder)
    assert (tmp_path / "file").read_text() == "mine"


INVALID = [  # a structure or some of its entries, and the message
    *((entries, "holds no factorized model: ") for entries in (
        "[" * 100_000,
        '{"format": 1, "layers": {}}',
        {"layers": ["mix"]},
        {"layers": {"mix": "4"}},
        {"layers": {"mix": True}},
        {"unpacked": None},
        {"unpacked": [["mix"]]},
    )),
    ({"format": 2}, "is of format 2, and this version reads 1"),
    ({"unpacked": ["mix"]}, r"does not fit this Net: .*; mix is a Conv1d, not an nn\.Multi"),
    ({"layers": {"a": 1, "b.c": 2}, "unpacked": ["d"]}, "the model has no d, a, b.c$"),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "message"), INVALID, ids=[str(entries)[:60] for entries, _ in INVALID])
def test_load_factorized_of_an_invalid_structure_file_raises(net, tmp_path, entries, message):
    save_factorized(make_small(net), tmp_path)
    path = tmp_path / "factorization.json"
    path.write_text(entries if isinstance(entries, str) else json.dumps(json.loads(path.read_text()) | entries))
    with pytest.raises(UserError, match=message):
        load_factorized(tmp_path, net)


def test_load_factorized_of_integer_weights_raises(net, tmp_path):
    save_factorized(make_small(net), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"norm.bias": torch.ones(12, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"norm.bias is torch.int32 in the folder, torch.float32 in the model"):
        load_factorized(tmp_path, net)


def trained(small):
    again = deepcopy(small)
    for name, parameter in again.named_parameters():
        if name.endswith((".u", ".v")):
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return again


def plain():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Flatten(), nn.Linear(128, 16), nn.Linear(16, 12)]
    return nn.Sequential(*layers, nn.Linear(12, 4)).double()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("from_dense", [False, True])
def test_peft_model_of_an_exported_adapter_equals_and_merges_exactly(tmp_path, from_dense):
    peft = pytest.importorskip("peft")
    base, x = plain(), torch.randn(2, 3, 6, 6).double()
    small = factorize(base, {"1": 0.25, "3": 0.5, "4": 0.1}, skip=("first", "last"))
    later = trained(small)
    export_lora(later, base if from_dense else small, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert len(set(config["rank_pattern"].values())) > 1
    adapted = peft.PeftModel.from_pretrained(deepcopy(base), tmp_path)
    expected = later(x) if from_dense else plus_change(base, small, later)(x)
    torch.testing.assert_close(adapted(x), expected, rtol=0, atol=1e-9)
    merged = adapted.merge_and_unload()
    assert repr(merged) == repr(base)
    torch.testing.assert_close(merged(x), expected, rtol=0, atol=1e-9)
    if from_dense:
        torch.testing.assert_close(merged.state_dict(), merge(later).state_dict(), rtol=0, atol=1e-10)


@pytest.mark.filterwarnings("ignore")
def test_peft_model_with_modules_to_save_equals_the_trained_model(tmp_path):
    peft = pytest.importorskip("peft")
    base, x = plain(), torch.randn(2, 3, 6, 6).double()
    later = trained(factorize(base, 0.25))
    for part in later[5].parameters():
        part.data += 1
    export_lora(later, base, tmp_path, modules_to_save=["5"])
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["5"]
    adapted = peft.PeftModel.from_pretrained(deepcopy(base), tmp_path)
    for made in (adapted, adapted.merge_and_unload()):
        torch.testing.assert_close(made(x), later(x), rtol=0, atol=1e-9)


def test_freeze_except_factors_leaves_only_factors_trainable():
    small = factorize(plain(), 0.25)
    small[3].v.requires_grad_(False)
    assert freeze_except_factors(small) is small
    training = {name for name, part in small.named_parameters() if part.requires_grad}
    assert training == {"1.u", "1.v", "3.u", "4.u", "4.v"}


def plus_change(base, small, later):
    moved = deepcopy(base)
    for name in small.factorize_report.layers:
        change = later.get_submodule(name).to_dense().weight - small.get_submodule(name).to_dense().weight
        moved.get_submodule(name).weight.data += change
    return moved


class Mixed(nn.Module):
    """Convolutions of each dimension, and an embedding."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(20, 8)
        self.mix = nn.Conv1d(8, 12, 3, stride=2, padding=1)
        self.image = nn.Conv2d(12, 8, (3, 1), padding=(1, 0), bias=False)
        self.volume = nn.Conv3d(8, 4, 1)

    def forward(self, ids):
        x = self.image(self.mix(self.tokens(ids).mT)[..., None])
        return self.volume(x[..., None])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("from_dense", [False, True])
def test_peft_model_of_embedding_and_convolution_adapters_is_equal(tmp_path, from_dense):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base, ids = Mixed().double(), torch.randint(20, (3, 10))
    small = factorize(base, {"tokens": 0.2, "mix": 0.5, "image": 0.5, "volume": 1.0}, skip=(), also=nn.Embedding)
    assert len(small.factorize_report.layers) == 4
    later = trained(small)
    export_lora(later, base if from_dense else small, tmp_path)
    adapted = peft.PeftModel.from_pretrained(deepcopy(base), tmp_path)
    expected = later(ids) if from_dense else plus_change(base, small, later)(ids)
    torch.testing.assert_close(adapted(ids), expected, rtol=0, atol=1e-9)
    assert (expected - base(ids)).abs().max() > 0.1


def test_export_lora_of_unsupported_changes_raises(tmp_path):
    small = factorize(plain(), 0.25)
    later = trained(small)
    later[4].bias.data += 1
    later[0].weight.data += 1
    with pytest.raises(UserError, match=r"2 tensors .* changed: 0\.weight, 4\.bias\. .*modules_to_save"):
        export_lora(later, small, tmp_path)
    with pytest.raises(UserError, match="4 is factorized; leave it out of modules_to_save"):
        export_lora(later, small, tmp_path, modules_to_save=["0", "4"])
    with pytest.raises(UserError, match="modules_to_save pattern 'hed' matches no layer"):
        export_lora(later, small, tmp_path, modules_to_save="hed")
    convs = [nn.ConvTranspose2d(8, 8, 3), nn.Conv2d(8, 8, 3, dilation=2), nn.Conv2d(8, 8, 3, groups=2)]
    convs += [nn.Conv1d(8, 8, 3, padding=1, padding_mode="reflect")]
    unsupported = factorize(nn.Sequential(*convs, nn.Linear(8, 8)), 0.25, skip=())
    with pytest.raises(UserError) as caught:
        export_lora(unsupported, unsupported, tmp_path)
    assert str(caught.value) == (
        "cannot export an adapter: 0, a FactorizedConvTranspose, has no form as LoRA; 1, a FactorizedConv with "
        "dilation, has no form as LoRA; 2, a FactorizedConv with groups, has no form as LoRA; 3, a FactorizedConv with "
        "padding_mode 'reflect', has no form as LoRA"
    )
    with pytest.raises(UserError, match="this FactorizedLinear is the whole model, and PEFT adapts layers inside one"):
        export_lora(factorize(nn.Linear(8, 8), 0.25, skip=()), nn.Linear(8, 8), tmp_path)
    with pytest.raises(UserError, match="no factorized layers"):
        export_lora(plain(), plain(), tmp_path)
    twice = factorize(nn.Sequential(*[nn.Linear(8, 8)] * 2), 0.25, skip=())
    twice[0].u.data[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"0 has another name too; PEFT would adapt one; 0\.u has NaN or Inf"):
        export_lora(twice, twice, tmp_path)
    export_lora(trained(small), small, tmp_path)
    with pytest.raises(UserError, match="holds an adapter already"):
        export_lora(trained(small), small, tmp_path)


def test_export_lora_with_changed_buffers_raises(tmp_path):
    base = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, affine=False), nn.Conv2d(8, 4, 3))
    small = factorize(base, 0.5, skip=("first", "last"))
    later = deepcopy(small).train()
    export_lora(later, base, tmp_path / "before")
    later(torch.randn(2, 3, 12, 12))
    with pytest.raises(UserError, match=r"2 tensors .*: 2\.running_mean, 2\.running_var"):
        export_lora(later, base, tmp_path / "after")


def test_load_factorized_to_a_device_moves_nonpersistent_buffers(tmp_path):
    class Tabled(nn.Sequential):
        def __init__(self):
            super().__init__(*(nn.Linear(8, 8) for _ in range(3)))
            self.register_buffer("table", torch.arange(4.0), persistent=False)

    save_factorized(factorize(Tabled(), 0.5), tmp_path)
    moved = []
    to = nn.Module.to
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "to", lambda module, device: moved.append(device) or to(module, device))
        load_factorized(tmp_path, Tabled(), device="cpu")
    assert moved == ["cpu"], "parameters and the table alike"
