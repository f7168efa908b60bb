"""Models and factors that other tools have changed: accelerate's hooks, quantization, pruning, parametrizations."""

from copy import deepcopy
from typing import get_args

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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
from sharding.matrices.quantization import Format

pytestmark = pytest.mark.filterwarnings("ignore:only .* are factorized")


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))


@pytest.mark.filterwarnings("ignore")
def test_torchao_weights_stay_dense_and_plan_raises(tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    model, x = build(), torch.randn(2, 16)
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    torch.testing.assert_close(factorize(model, 0.25)(x), model(x))
    with pytest.raises(UserError, match=r"0\.weight is of class Int8Tensor, which cannot be sent"):
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


@pytest.mark.parametrize("residual_format", ["int4", "int8"])
def test_averages_of_parameters_and_timms_leave_a_packed_residual_as_it_is(residual_format):
    timm = pytest.importorskip("timm.utils")
    small, x = factorize(build(), 0.25, residual_format=residual_format), torch.randn(2, 16)
    averages = AveragedModel(small, multi_avg_fn=get_ema_multi_avg_fn(0.9)), timm.ModelEmaV3(small, decay=0.9)
    for _ in range(10):  # nothing trains, so each average is the model
        averages[0].update_parameters(small)
        averages[1].update(small)
    for average in averages:
        torch.testing.assert_close(average(x), small(x), rtol=0, atol=1e-6)


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


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("residual_format", [None, *get_args(Format)])
def test_a_traced_model_computes_what_the_model_does(residual_format):
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=2), nn.ConvTranspose2d(8, 8, 3)
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 16), nn.Linear(16, 4))
    small = factorize(model, 0.25, residual_format=residual_format).eval()
    traced = torch.jit.trace(small, torch.randn(1, 3, 4, 4))
    x = torch.randn(5, 3, 4, 4, requires_grad=True)
    torch.testing.assert_close(traced(x), small(x), rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(each(x).square().sum(), x)[0] for each in (traced, small)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
