"""Models and factors that other tools have changed: accelerate's hooks, quantization, pruning, parametrizations."""

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm
from torch.utils._pytree import tree_map_only

from sharding import (
    ShardPlanner,
    UserError,
    client_model,
    export_lora,
    factorize,
    load_factorized,
    merge,
    save_factorized,
)

pytestmark = pytest.mark.filterwarnings("ignore:only .* are factorized")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


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


def test_quantized_weights_stay_dense_and_plan_and_save_raise(tmp_path):
    model = build()
    model[1].weight = nn.Parameter(Quantized(model[1].weight.detach()), requires_grad=False)
    small = factorize(model, 0.25)
    assert small.factorize_report.dense["1"] == "its weight is Quantized"
    assert set(small.factorize_report.layers) == {"2"}
    with pytest.raises(UserError, match=r"1\.weight is Quantized, which cannot be sent"):
        ShardPlanner().plan(model, {0: 0.5})
    with pytest.raises(UserError, match=r"1\.weight is Quantized, and cannot be saved"):
        save_factorized(small, tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_torchao_weights_stay_dense_and_plan_raises(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model, x = build(), torch.randn(2, 16)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    torch.testing.assert_close(factorize(model, 0.25)(x), model(x))
    with pytest.raises(UserError, match=r"0\.weight is Int8Tensor, which cannot be sent"):
        ShardPlanner().plan(model, {0: 0.5})


@pytest.mark.filterwarnings("ignore")
def test_torchao_quantizes_merged_layers_and_raises_for_factorized_ones():
    quantization = pytest.importorskip("torchao.quantization")
    config, small, x = quantization.Int8WeightOnlyConfig(), factorize(build(), 0.25), torch.randn(2, 16)
    merged = merge(small)
    quantization.quantize_(merged, config)
    assert all("Int8Tensor" in type(layer.weight).__name__ for layer in merged)
    torch.testing.assert_close(merged(x), small(x), rtol=0.1, atol=0.02)
    with pytest.raises(UserError, match=r"call sharding.merge\(model\) first"):
        quantization.quantize_(small, config, filter_fn=lambda layer, name: hasattr(layer, "weight"))


class Packed(nn.Module):
    """A layer like those of `quantize_dynamic`: no parameters, and a state that is not of tensors."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}dtype"] = torch.qint8

    def forward(self, x):
        return x


@pytest.mark.filterwarnings("ignore:no layer of this Sequential is sharded")
def test_model_without_parameters_stays_as_it_is_and_plan_and_save_raise(tmp_path):
    model, x = nn.Sequential(Packed(), Packed()), torch.randn(2, 3)
    with pytest.warns(UserWarning, match="nothing is factorized; what stays dense: a model without parameters"):
        assert torch.equal(factorize(model, 0.25)(x), x)
    with pytest.raises(UserError, match=r"0\.dtype is a dtype, which cannot be sent"):
        ShardPlanner().plan(model, {0: 0.5})
    with pytest.raises(UserError, match=r"0\.dtype is a dtype, and cannot be saved"):
        save_factorized(model, tmp_path)


def test_accelerate_hooks_warn_and_a_model_without_them_is_factorized():
    hooks = pytest.importorskip("accelerate.hooks")
    model, x = build(), torch.randn(3, 16)
    for layer in model:
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook("cpu"))
    with pytest.warns(UserWarning, match=r"nothing is factorized.*call accelerate.hooks.remove_hook_from_module"):
        factorize(model, 0.25)
    hooks.remove_hook_from_module(model, recurse=True)
    assert "forward" in vars(model[1])  # the class's own, bound
    small, expected = factorize(model, 0.25), factorize(build(), 0.25)
    torch.testing.assert_close(small(x), expected(x))
    torch.testing.assert_close(merge(small)(x), expected(x))
    assert (
        ShardPlanner().plan(model, {0: 0.5}).shard(0).to_bytes()
        == ShardPlanner().plan(build(), {0: 0.5}).shard(0).to_bytes()
    )


def test_models_offloaded_by_accelerate_raise_until_hooks_are_removed(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    start, x = factorize(build(), 0.25), torch.randn(3, 16)
    shard = ShardPlanner("full").plan(build(), {0: 1.0}).shard(0)
    client = accelerate.cpu_offload(client_model(build(), shard), execution_device="cpu")
    small = accelerate.cpu_offload(deepcopy(start), execution_device="cpu")
    torch.testing.assert_close(small(x), start(x))
    for use in (
        lambda: merge(small),
        lambda: merge(small, inplace=True),
        lambda: save_factorized(small, tmp_path),
        lambda: export_lora(small, start, tmp_path),
        lambda: shard.read_from(client),
    ):
        with pytest.raises(
            UserError, match=r"accelerate keeps the values of 0 elsewhere; call accelerate\.hooks\.remove"
        ):
            use()
    accelerate.hooks.remove_hook_from_module(small, recurse=True)
    torch.testing.assert_close(merge(small)(x), start(x))


def test_layer_with_forward_set_on_the_instance_stays_dense():
    model = build()
    model[1].forward = lambda x: x
    assert factorize(model, 0.25).factorize_report.dense["1"] == "this one overrides forward"


COMPUTED = {
    "pruned u": lambda layer: prune.l1_unstructured(layer, "u", 0.5),
    "pruned v and bias": lambda layer: prune.l1_unstructured(prune.random_unstructured(layer, "v", 0.5), "bias", 0.5),
    "pruned twice": lambda layer: prune.l1_unstructured(prune.l1_unstructured(layer, "u", 0.2), "u", 0.2),
    "orthogonal u": lambda layer: parametrizations.orthogonal(layer, "u"),
    "normalized v": lambda layer: parametrizations.weight_norm(layer, "v"),
    "spectral norm": lambda layer: spectral_norm(layer, "u"),
}


@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED)
def test_computed_factors_merge_to_their_values_and_save_raises(compute, tmp_path):
    small, x = factorize(build(), 0.5), torch.randn(3, 16)
    compute(small[1])
    small.eval()
    with torch.no_grad():  # the factor is computed in the next forward pass only
        next(part for name, part in small[1].named_parameters() if "bias" not in name).add_(0.1)
    merged = merge(small)
    torch.testing.assert_close(merged(x), small(x))
    assert type(merged[1]) is nn.Linear
    assert merged[1].weight.requires_grad
    merged(x).sum().backward()
    with pytest.raises(UserError, match="a factor of 1 is computed"):
        save_factorized(small, tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_factors_made_permanent_are_saved(tmp_path):
    small, x = factorize(build(), 0.5), torch.randn(3, 16)
    prune.remove(prune.l1_unstructured(small[1], "u", 0.5), "u")
    parametrizations.orthogonal(small[2], "u")
    parametrize.remove_parametrizations(small[2], "u")
    save_factorized(small, tmp_path)
    assert torch.equal(load_factorized(tmp_path, deepcopy(build()))(x), small(x))


def test_layers_named_like_those_of_torch_are_reported_with_a_hint():
    class Linear(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 16))

    with pytest.warns(
        UserWarning, match=r"tests\.sharding\.test_other_tools\..*Linear\.weight 100.*; .*register_layer"
    ):
        factorize(nn.Sequential(Linear(), Linear(), Linear()), 0.25)


@pytest.mark.filterwarnings("ignore")
def test_opacus_step_with_per_sample_gradients_trains_the_factors():
    opacus = pytest.importorskip("opacus")
    small = factorize(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 4)), 0.25)
    before = deepcopy(small)
    data = torch.utils.data.TensorDataset(torch.randn(8, 16), torch.arange(8) % 4)
    _, optimizer, *_, _ = opacus.PrivacyEngine(accountant="rdp").make_private(
        module=small,
        optimizer=torch.optim.SGD(small.parameters(), 1.0),
        data_loader=torch.utils.data.DataLoader(data, 8),
        noise_multiplier=0.0,
        max_grad_norm=1e6,
        poisson_sampling=False,
        grad_sample_mode="no_op",
    )
    x, y = data.tensors
    parameters = {name: part.detach() for name, part in small.named_parameters()}

    def loss(parameters, x, y):
        return nn.functional.cross_entropy(torch.func.functional_call(small, parameters, x[None]), y[None])

    for name, gradients in torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y).items():
        small.get_parameter(name).grad_sample = gradients
    optimizer.step()
    nn.functional.cross_entropy(before(x), y).backward()
    torch.testing.assert_close(small[2].u, before[2].u - before[2].u.grad)
