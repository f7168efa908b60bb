"""Published architectures at n = N: outputs, gradients, merging back; and how much of each is covered."""

import warnings

import pytest
import torch

from sharding import factorize, merge
from sharding.factorization import CoverageWarning

# Per cent of the parameters that lie in the weights replaced.
COVERAGE = {
    "timm/mobilenetv3_small_050": 91.6,
    "timm/ghostnet_050": 95.8,
    "timm/convnextv2_atto": 96.8,
    "timm/mobilevit_xxs": 98.0,
    "timm/vit_tiny_patch16_224": 58.7,
    "timm/beit_base_patch16_224": 58.8,
    "timm/eva02_tiny_patch14_224": 64.6,
    "timm/cait_xxs24_224": 73.2,
    "timm/swin_tiny_patch4_window7_224": 91.9,
    "timm/swinv2_tiny_window8_256": 92.2,
    "torchvision/shufflenet_v2_x0_5": 92.8,
    "torchvision/vit": 38.5,
    "transformers/gpt2": 89.1,
    "transformers/bert": 47.9,
    "transformers/albert": 49.1,
    "transformers/deberta": 25.2,
    "transformers/llama": 84.6,
    "transformers/llama tied": 92.1,
    "transformers/gpt-neox": 80.5,
    "transformers/opt": 19.4,
    "transformers/mamba": 78.5,
    "transformers/t5": 78.5,
    "torch/DCGAN": 64.8,
    "torch/LSTM": 9.6,
    "torch/TransformerEncoder": 74.8,
    "torch/audio": 67.8,
    "torch/video": 76.6,
}
LARGE = {
    "timm/resnet10t": 99.8,
    "timm/nf_regnet_b0": 46.3,
    "timm/resnext50_32x4d": 99.4,
    "timm/resnest14d": 99.5,
    "timm/resnetv2_50x1_bit": 0.0,
    "timm/gmlp_s16_224": 98.3,
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", [*COVERAGE, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_factorize_with_all_terms_equals_each_architecture(name):
    from tests.sharding.architectures import make, output  # which takes seconds

    model, inputs = make(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoverageWarning)
        small = factorize(model, 1.0)
    assert round(100 * small.factorize_report.coverage, 1) == (COVERAGE | LARGE)[name]
    expected, actual = output(model, inputs), output(small, inputs)
    scale = expected.detach().abs().max()
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=1e-10)
    probe = torch.randn_like(expected)
    for each in (expected, actual):
        (each / scale * probe).sum().backward()
    gradients = {
        key: part.grad for key, part in model.named_parameters(remove_duplicate=False) if part.grad is not None
    }
    largest = max(gradient.abs().max() for gradient in gradients.values())
    compared = 0
    for key, part in small.named_parameters(remove_duplicate=False):
        if key in gradients:
            torch.testing.assert_close(part.grad / largest, gradients[key] / largest, rtol=0, atol=1e-10)
        elif key.endswith(".u") and f"{key[:-1]}weight" in gradients:
            layer = small.get_submodule(key[:-2])
            dense = gradients[f"{key[:-1]}weight"].flatten(1).unflatten(0, (layer.num_blocks, -1))
            expected = (dense @ layer.v.unflatten(0, (layer.num_blocks, -1))).flatten(0, 1)
            torch.testing.assert_close(part.grad / largest, expected / largest, rtol=0, atol=1e-10)
            compared += 1
    assert compared or not small.factorize_report.layers or "Encoder" in name or name == "torchvision/vit"
    torch.testing.assert_close(merge(small).state_dict(), model.state_dict(), rtol=0, atol=1e-10)
