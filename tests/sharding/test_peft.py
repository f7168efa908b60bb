"""PEFT's adapters over factorized layers, and adapters that are exported for PEFT."""

from importlib.util import find_spec

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune

from sharding import UserError, export_lora, factorize, merge
from sharding.factorization import peft_check

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs the package peft")  # imported takes seconds


@pytest.mark.parametrize("safe", [False, True])
def test_merge_and_unload_over_a_factorized_base_raises_before_merge(safe):
    import peft

    torch.manual_seed(0)
    net, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), torch.randn(3, 16)
    tuned = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["1", "2"], init_lora_weights=False))
    small, expected = factorize(tuned, 1.0), tuned(x)
    torch.testing.assert_close(small(x), expected)
    with pytest.raises(UserError, match=r"call sharding.merge\(model\) first"):
        small.merge_and_unload(safe_merge=safe)
    torch.testing.assert_close(merge(small).merge_and_unload(safe_merge=safe)(x), expected)


SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
IDS = torch.arange(3, 27).view(2, 12)


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, intermediate_size=64)), {"input_ids": IDS}


def deepseek():
    config = transformers.DeepseekV3Config(
        **SIZES,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    )
    return transformers.DeepseekV3ForCausalLM(config), {"input_ids": IDS}


def mamba():
    config = transformers.Mamba2Config(
        vocab_size=99, hidden_size=32, num_heads=8, head_dim=8, state_size=8, num_hidden_layers=2, n_groups=1
    )
    return transformers.Mamba2ForCausalLM(config), {"input_ids": IDS}


def mobilebert():
    config = transformers.MobileBertConfig(
        **SIZES | {"hidden_size": 64}, embedding_size=32, intermediate_size=64, intra_bottleneck_size=32
    )
    return transformers.MobileBertForMaskedLM(config), {"input_ids": IDS}


def whisper():
    config = transformers.WhisperConfig(
        vocab_size=99,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=20,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
    )
    inputs = {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": IDS}
    return transformers.WhisperForConditionalGeneration(config), inputs


@pytest.mark.parametrize(
    ("build", "detected_without_batch", "reason"),
    [
        (bert, False, None),
        (deepseek, True, r"PEFT would leave 6 layers of this DeepseekV3ForCausalLM as they are: model\.layers\.0\.mlp"),
        (mamba, True, "PEFT cannot load this adapter of a Mamba2ForCausalLM: .*'out_proj' is incompatible"),
        (mobilebert, False, "MobileBertForMaskedLM reads a layer's weight and does not call the layer"),
        (whisper, False, "WhisperForConditionalGeneration raises AttributeError: 'Conv1d' object has no attribute"),
    ],
)
@pytest.mark.filterwarnings("ignore:only .* are factorized")
def test_export_lora_of_models_that_peft_cannot_run_raises(tmp_path, build, detected_without_batch, reason):
    torch.manual_seed(0)
    model, batch = build()
    small = factorize(model.eval(), 0.25)
    for given in (None, batch):
        folder = tmp_path / ("checked" if given else "unchecked")
        if reason is None or (given is None and not detected_without_batch):
            export_lora(small, model, folder, batch=given)
            assert {file.name for file in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
        else:
            with pytest.raises(UserError, match=reason):
                export_lora(small, model, folder, batch=given)
            assert not folder.exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"checked", "unchecked"}


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
@pytest.mark.parametrize("dense", [False, True])
def test_export_lora_with_a_batch_of_any_form_checks_the_adapter(tmp_path, form, dense):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    start, small = factorize(model, 0.25), factorize(model, 0.25)
    with torch.no_grad():
        small[1].u.add_(1)
    x = torch.randn(3, 16)
    batch = {"tensor": x, "tuple": (x,), "dict": {"input": x}}[form]
    export_lora(small, model if dense else start, tmp_path / "adapter", batch=batch)


def test_export_lora_of_wrapped_and_pruned_layers_passes_the_check(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), checkpoint_wrapper(nn.Sequential(nn.Linear(16, 16))), nn.Linear(16, 16))
    small = factorize(model, 0.5)
    prune.l1_unstructured(small[1][0], "u", 0.5)
    with torch.no_grad():
        small[1][0].u_orig.mul_(2)  # after the last forward pass
    export_lora(small, model, tmp_path / "adapter", batch=torch.randn(3, 16))


def test_export_lora_with_a_batch_without_peft_raises_importerror(tmp_path, monkeypatch):
    monkeypatch.setattr(peft_check, "find_spec", lambda name: None)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    small = factorize(model, 0.25)
    export_lora(small, model, tmp_path / "unchecked")
    with pytest.raises(ImportError, match="pip install peft"):
        export_lora(small, model, tmp_path / "adapter", batch=torch.randn(3, 16))
