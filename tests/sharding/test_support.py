"""Each kind of module, tensor and layer in the tables of what cannot be used: the function and its sentence."""

import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer
from torch.nn.utils import parametrizations, prune
from torch.utils._pytree import tree_map_only

from sharding import (
    FactorizedLinear,
    Server,
    ShardPlanner,
    UserError,
    client_model,
    factorize,
    load_factorized,
    save_factorized,
    shardable_layers,
    train_shard,
    unpack_attention,
)
from sharding.factorization.support import LAYERS, TO_SAVE, TO_SEND

pytestmark = [
    pytest.mark.filterwarnings("ignore:only .* are factorized"),
    pytest.mark.filterwarnings("ignore:no layer of this Sequential is sharded"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support"),
    pytest.mark.filterwarnings("ignore:`torch.jit"),
]


FLOAT8 = torch.float8_e4m3fnuz


def build(layer=None) -> nn.Sequential:
    """Five layers of which the third can be any; the first and the last stay dense by default."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    return nn.Sequential(*layers[:2], layer or nn.Linear(8, 8), *layers[2:])


class Quantized(Tensor):
    """A weight like those of torchao: its type is float32, and its values are elsewhere."""

    @staticmethod
    def __new__(cls, values):
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values):
        self.scale, self.integers = 0.1, (values / 0.1).round().to(torch.int8)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.overloadpacket not in (torch.ops.aten.t, torch.ops.aten.addmm, torch.ops.aten.detach):
            raise NotImplementedError(f"Quantized: {func}")
        if func.overloadpacket is torch.ops.aten.detach:
            return args[0]
        return func(*tree_map_only(cls, lambda part: part.integers * part.scale, args), **kwargs or {})

    def __deepcopy__(self, memo):
        return nn.Parameter(Quantized(self.integers * self.scale), requires_grad=False)


def with_weight(weight: Tensor) -> nn.Linear:
    layer = nn.Linear(8, 8)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


class Packed(nn.Module):
    """A layer like those of `quantize_dynamic`: no parameters, and a state that is not of tensors."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}dtype"] = torch.qint8

    def forward(self, x):
        return x


def with_buffer(buffer):
    layer = nn.Linear(8, 8)
    layer.register_buffer("odd", buffer)
    return layer


def with_forward():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    return Scaled(8, 8)


def patched():
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: nn.functional.linear(x, layer.weight) * 2
    return layer


def with_extra_state():
    class Stateful(nn.Linear):
        def get_extra_state(self):
            return {"steps": 1}

        def set_extra_state(self, state):
            pass

    return Stateful(8, 8)


def with_state_hook():
    layer = nn.Linear(8, 8)
    layer.register_state_dict_post_hook(lambda *_: None)
    return layer


def with_adapter():
    layer = nn.Linear(8, 8)
    layer.add_module("base_layer", nn.Linear(8, 8))
    layer.add_module("lora_A", nn.Linear(8, 2))
    return layer


def with_padding():
    layer = nn.Embedding(30, 8, padding_idx=1)
    nn.init.ones_(layer.weight)
    return layer


def tied(kind):
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    setattr(layers[1], kind, getattr(layers[0], kind))
    return layers


def sparse():
    return torch.eye(8).to_sparse_csr()


def quantized():
    return with_weight(Quantized(torch.randn(8, 8)))


def with_tail():
    plan = ShardPlanner("top_n", tail_format="float32").plan(build(), {0: 0.25, 1: 0.5})
    return client_model(build(), plan.shard(0))[2]


def pruned_factor():
    return prune.l1_unstructured(FactorizedLinear.from_dense(nn.Linear(8, 8), 2), "u", 0.5)


def hooked(device="meta"):
    layer = nn.Linear(8, 8, device=device)
    layer._hf_hook = object()
    return layer


# A layer of each kind, in the order of the table, and what its sentence names.
UNSENDABLE = [
    (lambda: with_buffer(UninitializedBuffer()), {"name": "2.odd"}),
    (quantized, {"name": "2.weight", "found": "Quantized"}),
    (lambda: with_buffer(sparse()), {"name": "2.odd", "found": "sparse_csr"}),
    (lambda: with_buffer(torch.ones(2).to(FLOAT8)), {"name": "2.odd", "found": FLOAT8}),
    (lambda: with_buffer(torch.ones(4, dtype=torch.cfloat).conj()), {"name": "2.odd"}),
    (lambda: with_buffer(torch.ones(1).expand(4)), {"name": "2.odd"}),
    (lambda: with_buffer(torch.inference_mode()(torch.ones)(4)), {"name": "2.odd"}),
]
UNSAVEABLE = [
    (hooked, {"name": "2"}),
    (with_extra_state, {"name": "2"}),
    (pruned_factor, {"name": "2"}),
    (with_tail, {"name": "2"}),
    (Packed, {"name": "2.dtype", "found": "dtype"}),
    (lambda: with_buffer(sparse()), {"name": "2.odd", "found": "sparse_csr"}),
    (lambda: with_buffer(torch.ones(2, dtype=torch.complex128)), {"name": "2.odd", "found": torch.complex128}),
]


def messages_of(table, cases):
    return [(make, sentence.format(**words)) for sentence, (make, words) in zip(table, cases, strict=True)]


@pytest.mark.parametrize(("make", "message"), messages_of(TO_SEND.tensors, UNSENDABLE), ids=[*TO_SEND.tensors])
def test_server_and_planner_of_a_model_that_cannot_be_sent_raise(make, message):
    model = build(make())
    for use in (
        lambda: Server(model, ShardPlanner()),
        lambda: ShardPlanner().plan(model, {0: 0.5}),
        lambda: ShardPlanner("dense").plan(model, {0: 1.0}),
        lambda: ShardPlanner().nbytes(model, 0.5),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            use()


SAVED = TO_SAVE.modules | TO_SAVE.tensors


@pytest.mark.parametrize(("make", "message"), messages_of(SAVED, UNSAVEABLE), ids=[*SAVED])
def test_save_of_a_model_that_safetensors_cannot_hold_raises(make, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)):
        save_factorized(build(make()), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_plan_of_a_layer_whose_state_is_not_of_tensors_raises():
    with pytest.raises(UserError, match=r"2\.dtype is of class dtype, which cannot be sent; quantize a model after"):
        ShardPlanner().plan(build(Packed()), {0: 0.5})


def test_structure_with_lazy_modules_raises(tmp_path):
    save_factorized(factorize(build(), 0.25), tmp_path)
    shard, lazy = ShardPlanner().plan(build(), {0: 0.5}).shard(0), build(nn.LazyLinear(8))
    for use in (lambda: client_model(lazy, shard), lambda: load_factorized(tmp_path, lazy)):
        with pytest.raises(UserError, match=r"2\.weight has no shape; run a batch through the model first"):
            use()


@pytest.mark.parametrize("script", [torch.jit.script, lambda model: torch.jit.trace(model, torch.randn(2, 8))])
def test_scripted_or_traced_model_raises(script, tmp_path):
    save_factorized(factorize(build(), 0.25), tmp_path)
    shard, scripted = ShardPlanner().plan(build(), {0: 0.5}).shard(0), script(build())
    for use in (
        lambda: factorize(scripted, 0.25),
        lambda: factorize(nn.Sequential(nn.Linear(8, 8), scripted), 0.25),
        lambda: shardable_layers(scripted),
        lambda: unpack_attention(scripted),
        lambda: Server(scripted, ShardPlanner()),
        lambda: ShardPlanner().plan(scripted, {0: 0.5}),
        lambda: client_model(scripted, shard),
        lambda: train_shard(scripted, shard, [], lr=0.1),
        lambda: load_factorized(tmp_path, scripted),
    ):
        with pytest.raises(UserError, match="the layers of a scripted or traced model cannot be replaced"):
            use()


COMPUTED = {"2": "its weight is computed (parametrized, normalized or pruned)"}
HOOKED = {"2": "accelerate has hooked it; call accelerate.hooks.remove_hook_from_module(model, recurse=True)"}
DENSE = {  # a layer, and the reasons in the report
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), COMPUTED),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(8, 8)), COMPUTED),
    "old spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(8, 8)), COMPUTED),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", amount=0.5), COMPUTED),
    "lazy": (lambda: nn.LazyLinear(8), {"2": "not initialized yet"}),
    "quantized": (quantized, {"2": "its weight is Quantized"}),
    "complex": (lambda: nn.Linear(8, 8, dtype=torch.complex64), {"2": "its weight is complex64"}),
    "float8": (lambda: with_weight(torch.randn(8, 8).to(FLOAT8)), {"2": "its weight is float8_e4m3fnuz"}),
    "sparse": (lambda: with_weight(sparse()), {"2": "its weight is sparse_csr"}),
    "hooked": (lambda: hooked("cpu"), HOOKED),
    "offloaded": (hooked, HOOKED),
    "own forward": (with_forward, {"2": "Scaled overrides forward"}),
    "patched": (patched, {"2": "this one overrides forward"}),
    "extra state": (with_extra_state, {"2": "Stateful has extra state"}),
    "state hook": (with_state_hook, {"2": "it has hooks on its state dict"}),
    "max_norm": (lambda: nn.Embedding(9, 8, max_norm=1), {"2": "an embedding with sparse gradients or max_norm"}),
    "sparse gradients": (
        lambda: nn.Embedding(9, 8, sparse=True),
        {"2": "an embedding with sparse gradients or max_norm"},
    ),
    "scaled": (lambda: nn.Embedding(9, 8, scale_grad_by_freq=True), {"2": "an embedding with scale_grad_by_freq"}),
    "padding": (with_padding, {"2": "an embedding whose padding row is not zero"}),
    "buffer": (lambda: with_buffer(torch.zeros(1)), {"2": "it holds more than a weight and a bias"}),
    "adapter": (
        with_adapter,
        {"2": "it holds more than a weight and a bias", "2.lora_A": "an adapter beside its base layer, small already"},
    ),
    "tied weights": (
        lambda: tied("weight"),
        {"2.0": "its weight is tied to 2.1.weight", "2.1": "its weight is tied to 2.0.weight"},
    ),
    "tied biases": (
        lambda: tied("bias"),
        {"2.0": "its bias is tied to 2.1.bias", "2.1": "its bias is tied to 2.0.bias"},
    ),
    "packed": (
        lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
        dict.fromkeys(("2", "2.out_proj"), "in a packed attention: it has add_bias_kv or add_zero_attn"),
    ),
    "nothing": (lambda: nn.Linear(8, 0), {"2": "a single term"}),
    "row": (lambda: nn.Linear(8, 1), {"2": "a single term"}),
    "column": (lambda: nn.Linear(1, 8), {"2": "a single term"}),
    "convolution": (lambda: nn.Conv2d(4, 1, 3), {"2": "a single term"}),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), {"2": "a single term a group (depthwise convolution)"}),
    "factorized": (lambda: FactorizedLinear.from_dense(nn.Linear(8, 8), 2), {"2": "factorized already; merge first"}),
}
RUNNABLE = {*list(DENSE)[:4], "quantized", "sparse", "own forward", "patched", "extra state", "buffer", "factorized"}


@pytest.mark.parametrize("kind", DENSE)
def test_layer_that_cannot_be_factorized_stays_dense_with_the_reason(kind):
    make, reasons = DENSE[kind]
    model = build(make())
    small = factorize(model, 0.25, also="2")
    assert {"1", "3"} <= small.factorize_report.layers.keys() <= {"1", "3", "2.base_layer"}
    assert reasons.items() <= small.factorize_report.unfactorized.items()
    assert type(small[2]) is type(model[2])
    if kind in RUNNABLE:
        x = torch.randn(2, 8)
        torch.testing.assert_close(small.eval()[2](x), model.eval()[2](x))


def test_each_reason_of_a_layer_has_a_case():
    reasons = [reason for _, found in DENSE.values() for reason in found.values()]
    patterns = [re.escape(sentence).replace(r"\{found\}", ".+") for sentence in LAYERS]
    assert [each for each in patterns if not any(re.fullmatch(each, reason) for reason in reasons)] == []
