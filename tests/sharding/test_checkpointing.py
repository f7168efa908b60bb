"""Blocks that are computed again: the same updates to the bit, for less memory, and no first product twice."""

import copy
from collections import Counter

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from models.cct import CCT
from models.gpt import GPT
from models.resnet import ResNetGN
from sharding import Server, ShardPlanner, UserError, checkpoint_blocks, client_model, factorize, train_shard
from sharding.modules import checkpointing
from sharding.modules.wrappers import named_state
from train.cli.client_memory import PeakMemory

IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(64).view(4, 16) % 11
MODELS = {
    "resnet": (lambda: ResNetGN((3, 16, 16), 5, width=16, blocks=(1, 2), groups=4), IMAGES),
    "cct": (lambda: CCT((3, 16, 16), 5, dim=32, heads=2, depth=2, stochastic_depth=0.5, attention_dropout=0.5), IMAGES),
    "gpt": (lambda: GPT((16,), 11, width=32, heads=2, depth=2, dropout=0.3), TOKENS),
}


def build(name):
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    return make(), inputs


def loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@pytest.mark.parametrize("strategy", ["top_n", "collective", "dense"])
@pytest.mark.parametrize("name", MODELS)
def test_update_of_checkpointed_blocks_has_the_same_bits(name, strategy):
    model, inputs = build(name)
    targets = inputs if name == "gpt" else torch.arange(4)
    shard = ShardPlanner(strategy, tail_format="int4").plan(model, {0: 0.2, 1: 0.5}).shard(0)
    updates = []
    for checkpoint in (False, True):
        torch.manual_seed(1)  # of dropout
        updates.append(train_shard(model, shard, [(inputs, targets)] * 2, lr=0.1, loss=loss, checkpoint=checkpoint))
    assert updates[0].to_bytes() == updates[1].to_bytes()


def test_checkpointed_blocks_on_a_residual_have_the_same_gradients():
    model, images = build("resnet")
    server = Server(factorize(model, 0.5, residual_format="int4"), ShardPlanner("top_n"))
    shard = server.plan({0: 0.2}, 0).shard(0)
    gradients = []
    for change in (lambda small: small, checkpoint_blocks):
        small = change(client_model(model, shard, frozen=server.frozen))
        with torch.autocast("cpu", torch.bfloat16):
            small(images).square().sum().backward()
        gradients.append({name: part.grad for name, part in named_state(small).items() if part.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


class Convolutions(TorchDispatchMode):
    """Counts convolutions by the shape of their filters."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution.default:
            self.counts[tuple(args[1].shape)] += 1
        return func(*args, **(kwargs or {}))


def test_products_with_v_are_computed_once_and_those_with_u_twice():
    model, images = build("resnet")
    shard = ShardPlanner("top_n").plan(model, {0: 0.1}).shard(0)
    counts = []
    for change in (lambda small: small, checkpoint_blocks):
        small = change(client_model(model, shard))
        with Convolutions() as convolutions:
            small(images).square().sum().backward()
        counts.append(convolutions.counts)
    plain, checkpointed = counts
    first = {shape for shape in plain if shape[2:] == (3, 3)}
    blocks = {shape for shape in first if shape[1] > 3}
    assert all(checkpointed[shape] == plain[shape] for shape in blocks)
    assert all(checkpointed[shape] == 2 * plain[shape] for shape in first - blocks)  # the stem, which is whole
    assert sum(checkpointed.values()) > sum(plain.values())


def test_checkpointed_blocks_take_less_memory():
    peaks = []
    model, _ = build("resnet")
    shard = ShardPlanner("top_n").plan(model, {0: 0.1}).shard(0)
    for change in (lambda small: small, checkpoint_blocks):
        small = change(client_model(model, shard))
        with PeakMemory() as peak:
            small(torch.randn(32, 3, 32, 32)).square().sum().backward()
        peaks.append(peak.nbytes)
    assert peaks[1] < 0.7 * peaks[0]


def assert_same_training(plain, checkpointed):
    """Two passes leave both models with the same parameters, buffers and gradients."""
    x, states = torch.randn(4, 8), []
    for model in (plain, checkpointed):
        for _ in range(2):
            model(x).square().sum().backward()
        state = named_state(model)
        states.append(state | {f"{name}.grad": part.grad for name, part in state.items() if part.requires_grad})
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


class Normed(nn.Module):
    """A block that writes its buffers."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.out = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x):
        return x + self.out(self.norm(self.fc(x)).relu())


@pytest.mark.parametrize("change", [checkpoint_blocks, lambda model: checkpoint_blocks(checkpoint_blocks(model))])
def test_checkpointed_blocks_write_their_buffers_once(change):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), Normed(), Normed(), nn.Linear(8, 2))
    checkpointed = change(copy.deepcopy(plain))
    assert_same_training(plain, checkpointed)
    assert sum(isinstance(module, CheckpointWrapper) for module in checkpointed.modules()) == 2


@pytest.mark.parametrize("kind", ["GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"])
def test_checkpointed_blocks_get_no_cache_of_keys(kind):
    make = getattr(transformers, kind)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"d_kv": 8, "d_ff": 32, "decoder_start_token_id": 0, "pad_token_id": 0}
    model = make(make.config_class(vocab_size=11, use_cache=True, **sizes))
    shard = ShardPlanner("top_n").plan(model, {0: 0.5}).shard(0)
    updates = []
    for checkpoint in (False, True):
        torch.manual_seed(1)  # of dropout
        batches = [{"input_ids": TOKENS, "labels": TOKENS}]
        updates.append(train_shard(model, shard, batches, lr=0.1, checkpoint=checkpoint).to_bytes())
    assert updates[0] == updates[1]


def test_model_without_blocks_raises():
    with pytest.raises(UserError, match=r"^Sequential has no blocks that could be computed again: .* train it without"):
        checkpoint_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 2))))


class Quantized(nn.Module):
    """A block that moves a codebook, in place or not, and takes its input by name."""

    def __init__(self, in_place):
        super().__init__()
        self.fc, self.in_place = nn.Linear(8, 8), in_place
        self.register_buffer("codebook", torch.randn(5, 8))

    def forward(self, *, hidden):
        x = self.fc(hidden)
        code = self.codebook[torch.cdist(x, self.codebook).argmin(1)]
        moved = self.codebook.lerp(code.mean(0).detach(), 0.1)
        self.codebook = self.codebook.copy_(moved) if self.in_place else moved
        return hidden + x * code


class Blocks(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(hidden=x)
        return x


@pytest.mark.parametrize("in_place", [True, False])
def test_checkpointed_blocks_write_a_codebook_once(in_place):
    torch.manual_seed(0)
    plain = Blocks(Quantized(in_place), Quantized(in_place))
    assert_same_training(plain, checkpoint_blocks(copy.deepcopy(plain)))


def test_random_numbers_of_the_device_of_an_input_by_name_are_restored(monkeypatch):
    """Of the devices that torch looks at: those of what it gets without a name."""
    looked_at = []

    def checkpoint(function, *args, **options):
        looked_at.append(args)
        return real(function, *args, **options)

    real = checkpointing.checkpoint
    monkeypatch.setattr(checkpointing, "checkpoint", checkpoint)
    x = torch.randn(4, 8)
    checkpoint_blocks(Blocks(Quantized(True)))(x)
    assert looked_at == [(x,)]
