"""Small models of published architectures with random weights, by name: (model, its inputs).

Widths and depths are the least that keep what is particular to each: grouped and depthwise convolutions, fused and
packed attention, tied weights, standardized convolutions, attention that reads its weights itself, recurrence.
"""

from collections.abc import Callable
from typing import Any

import timm
import torch
import torchvision.models as tv
import transformers as hf
from torch import Tensor, nn

Made = tuple[nn.Module, dict[str, Any]]
VIT = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}
SWIN = {"img_size": 56, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2)}
TIMM: dict[str, dict[str, Any]] = {
    "resnet10t": {},
    "resnext50_32x4d": {"layers": (1, 1, 1, 1)},
    "resnest14d": {},
    "resnetv2_50x1_bit": {},
    "nf_regnet_b0": {},
    "mobilenetv3_small_050": {},
    "ghostnet_050": {},
    "convnextv2_atto": {"depths": (1, 1, 1, 1)},
    "mobilevit_xxs": {},
    "vit_tiny_patch16_224": VIT,
    "beit_base_patch16_224": VIT,
    "eva02_tiny_patch14_224": VIT | {"img_size": 28},
    "cait_xxs24_224": VIT,
    "swin_tiny_patch4_window7_224": SWIN,
    "swinv2_tiny_window8_256": SWIN | {"img_size": 64},
    "gmlp_s16_224": {"img_size": 32},
}
NARROW = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TOKENS = NARROW | {"vocab_size": 50}
HF: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4)),
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**TOKENS)),
    "albert": lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**TOKENS, embedding_size=16)),
    "deberta": lambda: hf.DebertaV2ForMaskedLM(hf.DebertaV2Config(**TOKENS, relative_attention=True)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TOKENS, num_key_value_heads=2)),
    "llama tied": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TOKENS, tie_word_embeddings=True)),
    "gpt-neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TOKENS)),
    "opt": lambda: hf.OPTForCausalLM(
        hf.OPTConfig(**NARROW | {"vocab_size": 50, "ffn_dim": 64, "word_embed_proj_dim": 32})
    ),
    "mamba": lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2)),
    "t5": lambda: hf.T5EncoderModel(hf.T5Config(vocab_size=50, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4)),
}
TORCHVISION: dict[str, Callable[[], nn.Module]] = {
    "shufflenet_v2_x0_5": lambda: tv.shufflenet_v2_x0_5(num_classes=7),
    "vit": lambda: tv.VisionTransformer(64, 16, 2, 4, 32, 64, num_classes=7),
}


class Generator(nn.Sequential):
    """As DCGAN has it."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for a, b in ((8, 16), (16, 12), (12, 8)):
            layers += [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        super().__init__(*layers, nn.ConvTranspose2d(8, 3, 4, 2, 1))


class Recurrent(nn.Module):
    """An LSTM, whose weights are bare parameters, between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)
        self.lstm, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, 8) to (batch, 4)."""
        return self.head(self.lstm(self.second(self.first(x)))[0][:, -1])


def encoder() -> nn.Module:
    """A stock encoder with an embedding's worth of input."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)


def audio() -> nn.Module:
    """Convolutions over time, depthwise ones too."""
    layers = [nn.Conv1d(2, 16, 5), nn.Conv1d(16, 16, 3, groups=16), nn.Conv1d(16, 24, 1), nn.GELU()]
    return nn.Sequential(*layers, nn.Conv1d(24, 24, 3, groups=4), nn.Conv1d(24, 4, 1))


def video() -> nn.Module:
    """Convolutions over space and time."""
    return nn.Sequential(*(nn.Conv3d(a, b, 3, padding=1) for a, b in ((3, 8), (8, 12), (12, 12), (12, 4))))


OTHERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "DCGAN": (Generator, (2, 8, 4, 4)),
    "LSTM": (Recurrent, (2, 5, 8)),
    "TransformerEncoder": (encoder, (2, 5, 16)),
    "audio": (audio, (2, 2, 20)),
    "video": (video, (1, 3, 4, 6, 6)),
}


def make(name: str) -> Made:
    """Return a model in float64 and evaluation mode, none of whose parameters is zero, and what to call it with."""
    torch.manual_seed(0)
    home, _, kind = name.partition("/")
    if home == "timm":
        model = timm.create_model(kind, num_classes=7, **TIMM[kind])
        inputs = {"x": torch.randn(2, 3, *[TIMM[kind].get("img_size", 64)] * 2)}
    elif home == "torchvision":
        model, inputs = TORCHVISION[kind](), {"x": torch.randn(2, 3, 64, 64)}
    elif home == "transformers":
        model, inputs = HF[kind](), {"input_ids": torch.randint(50, (2, 6))}
    else:
        build, shape = OTHERS[kind]
        model, inputs = build(), {"x": torch.randn(shape)}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    return model.double().eval(), inputs


def output(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Call a model and return the first thing that it gives."""
    made = model(*inputs.values()) if "x" in inputs else model(**inputs)
    return made if isinstance(made, Tensor) else made[0]
