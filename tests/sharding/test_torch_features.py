"""What torch offers, on a factorized ViT (timm) and a factorized GPT-2 (transformers)."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sharding import ShardPlanner, factorize, merge, train_shard
from sharding.layers import UnpackedAttention

SKIP = {"timm/vit_tiny_patch16_224": ["patch_embed", "head"], "transformers/gpt2": ["lm_head"]}


VIT, GPT2 = SKIP
CASES = [
    (VIT, None),
    (GPT2, "int4"),
    pytest.param((VIT, "int4"), marks=pytest.mark.slow),
    pytest.param((GPT2, None), marks=pytest.mark.slow),
]


@pytest.fixture(params=CASES, ids=lambda param: f"{param[0].split('/')[1]}-{param[1]}")
def case(request):
    from tests.sharding.architectures import make  # which takes seconds

    name, residual = request.param
    model, inputs = make(name)
    model = model.float()
    if hasattr(model, "config"):
        model.config.use_cache = False
    inputs = {key: value.float() if value.is_floating_point() else value for key, value in inputs.items()}
    small = factorize(model, 0.4, SKIP[name], residual_format=residual)
    return Bare(small).eval(), tuple(inputs.values())


class Bare(nn.Module):
    """Gives a tensor."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        made = self.model(x)
        return made if isinstance(made, torch.Tensor) else made.logits


@pytest.mark.parametrize(
    ("layer", "x"),
    [
        (nn.Linear(8, 6), torch.randn(2, 8)),
        (nn.Conv2d(4, 6, 3), torch.randn(2, 4, 5, 5)),
        (nn.ConvTranspose2d(4, 6, 3), torch.randn(2, 4, 5, 5)),
        (nn.Embedding(8, 6), torch.tensor([1, 2])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_factorized_layer_is_called_by_torchs_keyword(layer, x):
    small = factorize(nn.Sequential(layer), 0.5, skip=(), also="*")[0]
    assert type(small).__name__.startswith("Factorized")
    torch.testing.assert_close(small(input=x), small(x), rtol=0, atol=0)


@pytest.mark.slow
def test_compile_of_a_factorized_model_has_one_graph(case):
    model, inputs = case
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)
    compiled(*inputs).sum().backward()


def test_replacement_of_a_compiled_layer_is_not_compiled():
    layer, attention, x = nn.Linear(8, 8), nn.MultiheadAttention(8, 2), torch.randn(3, 8)
    for each in (layer, attention):
        each.compile(backend="eager")
    assert UnpackedAttention(attention)._compiled_call_impl is None
    small = factorize(nn.Sequential(layer), 0.25, skip=(), inplace=True)
    assert torch.equal(small(x), small[0].forward(x))
    small[0].compile(backend="eager")
    merge(small, inplace=True)
    assert torch.equal(small(x), small[0].forward(x))


def test_torch_export_with_a_dynamic_batch_is_equal(case):
    model, inputs = case
    batch = torch.export.Dim("batch", min=2, max=64)
    exported = torch.export.export(model, inputs, dynamic_shapes=({0: batch},)).module()
    longer = tuple(torch.cat([x, x, x]) for x in inputs)
    torch.testing.assert_close(exported(*longer), model(*longer), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnx_export_of_a_factorized_model_is_equal(case, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, inputs = case
    in_onnx = merge(model) if any(name.endswith("residual") for name, _ in model.named_buffers()) else model
    torch.onnx.export(in_onnx, inputs, tmp_path / "model.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    feed = {each.name: x.numpy() for each, x in zip(session.get_inputs(), inputs, strict=True)}
    made = torch.from_numpy(session.run(None, feed)[0])
    torch.testing.assert_close(made, model(*inputs), rtol=1e-3, atol=1e-4)


def test_autocast_of_a_factorized_model_is_near_float32(case):
    model, inputs = case
    with torch.autocast("cpu", torch.bfloat16):
        low = model(*inputs)
    high = model(*inputs)
    assert (low.float() - high).abs().max() < 0.1 * high.abs().max()
    low.float().sum().backward()
    assert all(part.grad is None or part.grad.dtype == torch.float32 for part in model.parameters())


def test_linear_step_under_autocast_casts_its_input_each_factor_and_gradient_once():
    small, x, casts = factorize(nn.Linear(8, 6, bias=False), 0.5, skip=()), torch.randn(3, 8), Counter()

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            casts[args[0].shape] += func is torch.ops.aten._to_copy.default
            return func(*args, **kwargs or {})

    with Casts(), torch.autocast("cpu", torch.bfloat16):
        small(x).sum().backward()
    assert +casts == {x.shape: 1, small.u.shape: 2, small.v.shape: 2}


def test_factorized_embedding_under_autocast_keeps_its_dtype():
    model, ids = nn.Sequential(nn.Embedding(9, 8)), torch.tensor([1, 2])
    small = factorize(model, 0.25, skip=(), also="0")
    with torch.autocast("cpu", torch.bfloat16):
        assert small(ids).dtype == model(ids).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_per_sample_gradients_with_vmap_sum_to_the_gradient(case):
    model, inputs = case
    factors = {name: part.detach() for name, part in model.named_parameters() if name.endswith((".u", ".v"))}

    def loss(factors, x):
        return torch.func.functional_call(model, factors, (x[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(factors, inputs[0])
    model.zero_grad()
    model(*inputs).square().sum().backward()
    for name, gradient in each.items():
        expected = model.get_parameter(name).grad
        torch.testing.assert_close(gradient.sum(dim=0), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize(
    "mode", [torch.device("meta"), torch.no_grad(), torch.inference_mode()], ids=["meta", "no_grad", "inference"]
)
def test_round_in_another_mode_of_torch_equals_the_plain_one(mode):
    def net():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    batch = (torch.randn(4, 8), torch.arange(4))
    expected = train_shard(net(), ShardPlanner().plan(net(), {0: 0.5}).shard(0), [batch], lr=0.1).to_bytes()
    model, small = net(), factorize(net(), 0.25)
    with mode:
        shard = ShardPlanner().plan(model, {0: 0.5}).shard(0)
        assert train_shard(model, shard, [batch], lr=0.1).to_bytes() == expected
        assert torch.equal(factorize(model, 0.25)[1].u, small[1].u)
