"""Every model by name: parameter counts, shapes, seeds, and invalid options."""

from functools import partial

import pytest
import torch
from torch import nn

from models import LOADERS, MODELS, build_model
from models.attention import FeedForward
from models.cct import DropPath
from models.resnet import BasicBlock
from sharding import Shard, ShardPlanner, UserError

SMALL = {
    "resnet18_gn": ((3, 16, 16), 10, {"width": 8, "groups": 2}),
    "cct_6_3x2": ((3, 16, 16), 10, {"dim": 16, "depth": 2, "heads": 2}),
    "gpt_tiny": ((12,), 90, {"width": 16, "depth": 2, "heads": 2}),
    "gru": ((12,), 90, {"width": 16}),
    "mlp": ((1, 8, 8), 10, {"hidden": [12, 7]}),
    "cnn": ((1, 8, 8), 10, {"widths": [3, 4], "hidden": [12, 9]}),
}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def small(name: str) -> tuple[nn.Module, torch.Tensor]:
    shape, num_classes, options = SMALL[name]
    model = build_model(name, input_shape=shape, num_classes=num_classes, **options)
    batch = torch.randint(num_classes, (2, *shape)) if len(shape) == 1 else torch.randn(2, *shape)
    return model, batch


@pytest.mark.parametrize(
    ("name", "shape", "num_classes", "expected"),
    [
        ("cct_6_3x2", (3, 32, 32), 100, 3_350_053),
        ("cct_6_3x2", (3, 32, 32), 10, 3_326_923),
        ("cct_6_3x2", (3, 64, 64), 200, 3_424_905),
        # He et al.'s ResNet-18 with 11,689,512 parameters, less its 7x7 stem and 1,000 classes.
        ("resnet18_gn", (3, 32, 32), 10, 11_689_512 - 3 * 64 * (7 * 7 - 3 * 3) - 990 * 513),
        # Three gates of the state and the input each, with two biases; the second layer reads the first.
        ("gru", (5,), 90, 90 * 8 + 3 * 256 * (8 + 256 + 2) + 3 * 256 * (256 + 256 + 2) + 257 * 90),
        ("mlp", (1, 28, 28), 10, 785 * 64 + 65 * 10),
        ("cnn", (1, 28, 28), 10, 26 * 8 + (8 * 25 + 1) * 16 + (16 * 49 + 1) * 64 + 65 * 10),
        # Ids, positions, output; per block 12 matrices of 256x256 and 13 vectors; one more norm.
        ("gpt_tiny", (80,), 90, (90 + 80 + 90) * 256 + 3 * (12 * 256**2 + 13 * 256) + 2 * 256),
    ],
)
def test_parameter_count_of_any_model_is_the_published_one(
    name: str, shape: tuple[int, ...], num_classes: int, expected: int
) -> None:
    assert count(build_model(name, input_shape=shape, num_classes=num_classes)) == expected


@pytest.mark.parametrize("name", sorted(MODELS.keys() - LOADERS.keys()))
def test_forward_of_any_model_has_logits_and_gradients_everywhere(name: str) -> None:
    model, batch = small(name)
    for parameter in model.parameters():  # so that nothing is at a zero start
        nn.init.normal_(parameter, std=0.1)
    logits = model.eval()(batch)
    shape, num_classes, _ = SMALL[name]
    assert logits.shape == ((2, *shape, num_classes) if len(shape) == 1 else (2, num_classes))
    logits.square().sum().backward()
    idle = {key for key, parameter in model.named_parameters() if not parameter.grad.any()}
    assert idle <= {"pool.bias"} | {key for key in idle if "k.bias" in key}  # softmax ignores a constant


@pytest.mark.parametrize("name", sorted(MODELS.keys() - LOADERS.keys()))
def test_build_model_with_the_same_global_seed_has_equal_weights(name: str) -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(torch.nn.utils.parameters_to_vector(small(name)[0].parameters()))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.parametrize("name", sorted(MODELS.keys() - LOADERS.keys()))
def test_forward_of_a_batch_equals_that_of_its_samples(name: str) -> None:
    model, batch = small(name)
    model.eval()
    torch.testing.assert_close(model(batch)[:1], model(batch[:1]))


@pytest.mark.parametrize("name", ["cct_6_3x2", "gpt_tiny"])
def test_attention_projections_are_linear_layers(name: str) -> None:
    model, _ = small(name)
    linear = {key for key, module in model.named_modules() if isinstance(module, nn.Linear)}
    blocks = "layers" if name == "cct_6_3x2" else "blocks"
    assert {f"{blocks}.1.attention.{part}" for part in ("q", "k", "v", "out")} <= linear
    in_linear = {f"{key}.{which}" for key in linear for which in ("weight", "bias")}
    matrices = {key for key, parameter in model.named_parameters() if parameter.ndim == 2}
    assert matrices - in_linear <= {"positions", "tokens.weight"}


def test_gpt_logits_do_not_depend_on_later_tokens() -> None:
    model, ids = small("gpt_tiny")
    model.eval()
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 90
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7], after[:, 7])
    torch.testing.assert_close(model(ids[:, :5]), before[:, :5])


def test_cct_pooling_weights_sum_to_one() -> None:
    model, images = small("cct_6_3x2")
    model.eval()
    nn.init.zeros_(model.norm.weight)
    nn.init.ones_(model.norm.bias)  # every place says the same, so pooling must say it too
    expected = model.fc(torch.ones(1, 16)).expand(2, -1)
    torch.testing.assert_close(model(images), expected)


def test_cct_dropout_acts_only_in_training() -> None:
    model, images = small("cct_6_3x2")
    with torch.no_grad():
        assert not torch.equal(model.train()(images), model(images))
        assert torch.equal(model.eval()(images), model(images))


@pytest.mark.parametrize("blocks", [[1], [1, 2], [2, 2, 2, 2]])
def test_resnet_with_any_number_of_stages_accepts_small_gray_images(blocks: list[int]) -> None:
    model = build_model("resnet18_gn", input_shape=(1, 8, 8), num_classes=10, width=8, groups=4, blocks=blocks)
    assert [len(stage) for stage in model.stages] == blocks
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_resnet_stem_keeps_the_size_and_later_stages_halve_it() -> None:
    model, images = small("resnet18_gn")
    features = model.conv1(images)
    sizes = [features.shape[-1]]
    for stage in model.stages:
        features = stage(features)
        sizes.append(features.shape[-1])
    assert sizes == [16, 16, 8, 4, 2]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def test_resnet_with_a_strided_stem_halves_the_image() -> None:
    model = build_model("resnet18_gn", input_shape=(3, 16, 16), num_classes=4, width=4, groups=2, stem_stride=2)
    assert model.conv1(torch.zeros(1, 3, 16, 16)).shape == (1, 4, 8, 8)


def test_resnet_with_zero_init_last_starts_with_identity_blocks() -> None:
    options = {"input_shape": (3, 8, 8), "num_classes": 4, "width": 4, "groups": 2, "blocks": [2]}
    ours, timms = (build_model("resnet18_gn", **options, zero_init_last=zero) for zero in (False, True))
    activations = torch.rand(2, 4, 8, 8)
    assert torch.equal(timms.stages(activations), activations)
    assert not torch.equal(ours.stages(activations), activations)
    assert timms.fc.bias.any()  # as torch has it
    assert not ours.fc.bias.any()


def timms_blocks():
    """Yield parts of the models with those of timm, and the shape of an input."""
    timm = pytest.importorskip("timm")
    norm, basic = partial(nn.GroupNorm, 2), timm.models.resnet.BasicBlock
    shortcut = nn.Sequential(nn.Conv2d(4, 8, kernel_size=1, stride=2, bias=False), norm(8))
    yield BasicBlock(4, 4, 1, 2), basic(4, 4, norm_layer=norm), (3, 4, 6, 6)
    yield BasicBlock(4, 8, 2, 2), basic(4, 8, 2, shortcut, norm_layer=norm), (3, 4, 6, 6)
    yield FeedForward(4, 8, nn.GELU()), timm.layers.Mlp(4, 8), (3, 5, 4)
    yield FeedForward(4, 8, nn.GELU("tanh")), timm.layers.Mlp(4, 8, act_layer=timm.layers.GELUTanh), (3, 5, 4)
    yield DropPath(0.4), timm.layers.DropPath(0.4), (30, 5, 4)


def test_parts_of_models_have_the_names_and_bits_of_timms() -> None:
    for ours, timms, shape in timms_blocks():
        timms.load_state_dict(ours.state_dict())
        inputs, found = torch.randn(shape), []
        for part in (ours, timms):
            torch.manual_seed(1)
            outputs = part(read := inputs.clone().requires_grad_())
            outputs.square().sum().backward()
            found.append([outputs, read.grad, *(parameter.grad for parameter in part.parameters())])
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))


def test_resnet_gradients_of_the_first_step_are_nonzero_everywhere() -> None:
    model, images = small("resnet18_gn")
    model(images).square().sum().backward()
    assert all(parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("resnet18", (3, 8, 8), {}, r"unknown model 'resnet18' \(did you mean 'resnet18_gn'\?\)"),
        ("resnet18_gn", (3, 8, 8), {"blocks": []}, r"blocks=\[\] must be positive"),
        ("resnet18_gn", (3, 8, 8), {"blocks": [2, 0]}, r"blocks=\[2, 0\] must be positive"),
        ("resnet18_gn", (3, 8, 8), {"width": 12}, "groups=32 does not divide width=12"),
        ("resnet18_gn", (80,), {}, "reads images"),
        ("cnn", (1, 3, 9), {}, "at least 4 by 4, not 3 by 9"),
        ("cct_6_3x2", (80,), {}, "reads images"),
        ("cct_6_3x2", (3, 8, 8), {"heads": 3}, "heads=3 does not divide dim=256"),
        ("cct_6_3x2", (3, 8, 8), {"stochastic_depth": 1}, "stochastic_depth=1 must be at least 0"),
        ("gpt_tiny", (3, 8, 8), {}, "reads sequences"),
        ("gpt_tiny", (80,), {"heads": 3}, "heads=3 does not divide width=256"),
        ("gpt_tiny", (80,), {"dropout": -0.1}, "dropout=-0.1 must be at least 0"),
    ],
)
def test_build_model_with_invalid_options_raises_with_the_reason(
    name: str, shape: tuple[int, ...], options: dict, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build_model(name, input_shape=shape, num_classes=10, **options)


def test_build_model_with_an_integer_dropout_accepts_it() -> None:
    assert build_model("gpt_tiny", input_shape=(4,), num_classes=5, width=8, dropout=0).dropout.p == 0


@pytest.mark.parametrize("name", ["cct_6_3x2", "gpt_tiny"])
def test_model_with_fused_projections_equals_separate_ones(name: str) -> None:
    shape, num_classes, options = SMALL[name]
    split, batch = small(name)
    fused = build_model(name, input_shape=shape, num_classes=num_classes, **options, fused_qkv=True)
    state = split.state_dict()
    for key in fused.state_dict().keys() - state.keys():
        state[key] = torch.cat([state.pop(key.replace(".qkv.", f".{part}.")) for part in "qkv"])
    fused.load_state_dict(state)
    assert count(fused) == count(split)
    torch.testing.assert_close(fused.eval()(batch), split.eval()(batch))
    assert tenth(fused).nbytes < tenth(split).nbytes


def tenth(model: nn.Module) -> Shard:
    """The shard of a client that keeps a tenth."""
    return ShardPlanner("top_n").plan(model, {0: 0.1}).shard(0)


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("gpt_tiny", {"fc"}),  # it begins with its embedding, so every projection is sharded
        ("cct_6_3x2", {"tokenizer.0", "pool", "fc"}),  # the pooling has rank 1
        ("resnet18_gn", {"conv1", "fc"}),
    ],
)
def test_default_skip_of_any_model_is_its_first_and_last_layer(name: str, dense: set[str]) -> None:
    model, _ = small(name)
    affine = {key for key, part in model.named_modules() if isinstance(part, nn.Linear | nn.Conv2d)}
    assert affine - tenth(model).terms.keys() == dense
