"""Small language models of transformers with random weights: shards, client models and training."""

import pytest
import torch
import transformers
from torch import nn

from sharding import Shard, ShardPlanner, UserError, client_model, factorize, init_empty, train_shard
from sharding.layers import base

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
T5 = {"vocab_size": 99, "d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8}


def build() -> nn.Module:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0))


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(14).view(2, 7)
    return model(input_ids=ids, decoder_input_ids=ids).logits


def test_shard_of_a_weight_with_four_names_has_it_once():
    torch.manual_seed(0)
    server = build().eval()
    names = [n for n, p in server.named_parameters(remove_duplicate=False) if p is server.get_input_embeddings().weight]
    assert len(names) == 4
    shard = ShardPlanner("full").plan(server, {0: 1.0}).shard(0)
    assert len(set(names) & shard.whole.keys()) == 1
    sharded = sum(server.get_submodule(layer).weight.numel() for layer in shard.terms)
    buffers = sum(tensor.numel() for tensor in server.buffers() if tensor.is_floating_point())
    sent = sum(tensor.numel() for tensor in shard.whole.values())
    assert sent <= sum(parameter.numel() for parameter in server.parameters()) - sharded + buffers
    with init_empty():
        structure = build().eval()
    client = client_model(structure, Shard.from_bytes(shard.to_bytes()))
    tied = [p for n, p in client.named_parameters(remove_duplicate=False) if n in names]
    assert all(parameter is tied[0] for parameter in tied)
    torch.testing.assert_close(logits(client), logits(server), rtol=1e-4, atol=1e-5)


def test_train_shard_on_batches_of_keyword_arguments_uses_the_model_loss():
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, num_labels=3, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    model = transformers.BertForSequenceClassification(config)
    shard = ShardPlanner("full").plan(model, {0: 1.0}).shard(0)
    ids, labels = torch.arange(14).view(2, 7), torch.tensor([0, 2])
    named = train_shard(model, shard, [{"input_ids": ids, "labels": labels}], lr=0.1)
    paired = train_shard(model, shard, [(ids, labels)], lr=0.1)  # cross-entropy of the logits, as BERT's own loss is
    expected = shard.read_from(client_model(model, shard))
    torch.testing.assert_close(named.trained(), paired.trained(), rtol=0, atol=0)
    assert not torch.equal(named.whole["classifier.weight"], expected.whole["classifier.weight"])
    masked = {"input_ids": ids, "attention_mask": (ids % 7 < 5).long(), "labels": labels}
    other = train_shard(model, shard, [masked], lr=0.1)
    assert not torch.equal(other.whole["classifier.weight"], named.whole["classifier.weight"])
    with pytest.raises(UserError, match=r"no loss for a batch with input_ids; .*'labels'"):
        train_shard(model, shard, [{"input_ids": ids}], lr=0.1)


def test_forward_that_reads_weight_dtype_composes_no_weight(monkeypatch):
    small = factorize(transformers.T5EncoderModel(transformers.T5Config(**T5)).eval(), 0.25)
    ids = torch.arange(7)[None]
    expected = small(ids).last_hidden_state
    monkeypatch.setattr(base, "compose", None)  # T5 reads `wo.weight.dtype`
    assert torch.equal(small(ids).last_hidden_state, expected)
