"""Pretrained weights: of transformers' folders, timm's models and files; what is loaded, and what does not fit."""

import argparse
import json
import logging
from functools import partial

import pytest
import safetensors.torch
import torch
from torch import nn

from models import build_model, load_pretrained
from models.hub import reading
from sharding import UserError, init_empty


def bert(folder, num_labels=2, **sizes):
    """Write a small BERT to a folder, and return it."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24} | sizes
    config = transformers.BertConfig(
        vocab_size=30, max_position_embeddings=12, num_labels=num_labels, attn_implementation="eager", **sizes
    )
    torch.manual_seed(1)
    model = transformers.BertForSequenceClassification(config)
    model.save_pretrained(folder)
    return model.eval()


def load(name, source, shape, num_classes, **options):
    if name == "transformers":
        options |= {"weights": str(source)}
    model = build_model(name, input_shape=shape, num_classes=num_classes, **options)
    load_pretrained(name, model, str(source))
    return model.eval()


def test_transformer_of_a_folder_computes_what_it_did_and_ignores_padding(tmp_path):
    reference, ids = bert(tmp_path, num_labels=3), torch.tensor([[2, 7, 9, 0, 0, 0]])
    model = load("transformers", tmp_path, (6,), 3)
    expected = reference(input_ids=ids[:, :3]).logits
    torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=1e-6)
    assert {name for name, part in model.named_parameters() if not part.requires_grad} == {
        f"model.bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")
    }


@pytest.mark.parametrize("end", [3, [3, 4]], ids=str)
def test_transformer_masks_the_given_padding_else_its_own_else_its_end(tmp_path, end):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2, "eos_token_id": end}
    for pad, given, expected in ((None, None, 3), (5, None, 5), (5, 0, 0), (None, 7, 7)):
        transformers.GPT2Config(**sizes, pad_token_id=pad).save_pretrained(tmp_path)
        with init_empty():
            model = build_model(
                "transformers", input_shape=(6,), num_classes=2, weights=str(tmp_path), pad_token_id=given
            )
        assert model.pad_token_id == model.model.config.pad_token_id == expected


def test_transformer_for_other_classes_has_a_new_head_and_says_so(tmp_path, caplog):
    bert(tmp_path, num_labels=3)
    with caplog.at_level(logging.INFO):
        model = load("transformers", tmp_path, (6,), 5)
    assert model(torch.ones(2, 6, dtype=torch.int64)).shape == (2, 5)
    assert "of another shape, so new: classifier.bias, classifier.weight" in caplog.text


def test_positions_of_a_roberta_begin_after_its_padding(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    transformers.RobertaConfig(vocab_size=30, max_position_embeddings=12, **sizes).save_pretrained(tmp_path)
    make = partial(build_model, "transformers", num_classes=2, weights=str(tmp_path))
    assert make(input_shape=(10,))(torch.full((2, 10), 5)).shape == (2, 2)
    with pytest.raises(UserError, match=r"data.max_length=11 must be at most 10, the model's positions"):
        make(input_shape=(11,))


@pytest.mark.parametrize("kind", ["XLNet", "XLM", "Flaubert"])
def test_padding_before_a_text_changes_nothing_where_the_last_position_is_read(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "summary_type": "last", "pad_token_id": 0, "pad_index": 0}
    sizes |= {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 24} if kind == "XLNet" else {}
    sizes |= {"emb_dim": 16, "n_layers": 1, "n_heads": 2} if kind != "XLNet" else {}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    getattr(transformers, f"{kind}ForSequenceClassification")(config).save_pretrained(tmp_path)
    model, text = load("transformers", tmp_path, (6,), 2), torch.tensor([[7, 9, 8]])
    expected = model(text)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(model(torch.cat([torch.zeros_like(text), text], 1)), expected, rtol=1e-5, atol=1e-6)


def test_xlnet_reads_texts_of_any_length(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.XLNetConfig(vocab_size=30, d_model=16, n_layer=1, n_head=2, d_inner=24).save_pretrained(tmp_path)
    model = build_model("transformers", input_shape=(700,), num_classes=2, weights=str(tmp_path))
    assert model(torch.full((2, 7), 5)).shape == (2, 2)


def test_transformer_for_causal_lm_predicts_the_vocabulary(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    reference = transformers.GPT2LMHeadModel(config).eval()
    reference.save_pretrained(tmp_path)
    ids = torch.randint(40, (2, 8))
    model = load("transformers", tmp_path, (8,), 40, task="causal_lm", train_embeddings=True)
    torch.testing.assert_close(model(ids), reference(ids).logits, rtol=1e-5, atol=1e-6)
    assert all(part.requires_grad for part in model.parameters())


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "Electra", "Ernie", "RoFormer", "BigBird", "RemBert"])
def test_encoder_for_causal_lm_reads_in_one_direction(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    if kind in ("Electra", "RoFormer"):
        sizes |= {"embedding_size": 16}
    if kind == "RemBert":
        sizes |= {"input_embedding_size": 16, "output_embedding_size": 16}
    config = getattr(transformers, f"{kind}Config")(vocab_size=30, max_position_embeddings=20, **sizes)
    getattr(transformers, f"{kind}ForMaskedLM")(config).save_pretrained(tmp_path)
    model = load("transformers", tmp_path, (6,), 30, task="causal_lm")
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    changed = torch.tensor([[5, 6, 7, 8, 9, 11]])
    assert torch.equal(model(ids)[0, :5], model(changed)[0, :5])
    assert not torch.equal(model(ids)[0, 5], model(changed)[0, 5])


def test_transformer_names_its_classes(tmp_path):
    bert(tmp_path)
    model = load("transformers", tmp_path, (6,), 3, class_names=("a", "b", "c"))
    assert model.model.config.id2label == {0: "a", 1: "b", 2: "c"}
    assert model.model.config.label2id == {"a": 0, "b": 1, "c": 2}


def test_positions_that_count_from_another_padding_raise(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    transformers.RobertaConfig(vocab_size=30, max_position_embeddings=12, **sizes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"the tokenizer pads with the id 0, and weights=.* with 1, from"):
        build_model("transformers", input_shape=(6,), num_classes=2, weights=str(tmp_path), pad_token_id=0)


def test_warnings_of_transformers_are_logged_once(caplog):
    logs = pytest.importorskip("transformers.utils.logging")
    for _ in range(2):
        with reading("here", "something"):
            logs.get_logger("transformers.some").warning("mind\nthis")
            logs.get_logger("transformers.some").info("not this")
    assert [record.getMessage() for record in caplog.records] == ["transformers: mind this"]


def test_repository_with_code_of_its_own_is_refused(tmp_path, monkeypatch):
    bert(tmp_path)
    path = tmp_path / "config.json"
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (tmp_path / "own.py").write_text("raise SystemExit")
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("it asks"))
    with pytest.raises(UserError, match="it needs code of its own, which this program does not run"):
        build_model("transformers", input_shape=(6,), num_classes=2, weights=str(tmp_path))


def test_transformer_for_causal_lm_freezes_embedding_and_output_layer_unless_asked(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=40, num_key_value_heads=1, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    for train in (False, True):
        model = load("transformers", tmp_path, (8,), 40, task="causal_lm", train_embeddings=train)
        frozen = {name for name, part in model.named_parameters() if not part.requires_grad}
        assert frozen == (set() if train else {"model.model.embed_tokens.weight", "model.lm_head.weight"})


def test_transformer_that_cannot_be_loaded_raises_one_line(tmp_path):
    bert(tmp_path / "bert")
    (tmp_path / "empty").mkdir()
    for weights, shape, message in (
        (tmp_path / "empty", (6,), "cannot read weights=.*empty for sequence_classification: "),
        (tmp_path / "bert", (13,), "data.max_length=13 must be at most 12, the model's positions"),
        (tmp_path / "bert", (3, 8, 8), "reads token ids"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            build_model("transformers", input_shape=shape, num_classes=2, weights=str(weights))
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"needs weights=…"):
        build_model("transformers", input_shape=(6,), num_classes=2)
    (tmp_path / "bert/model.safetensors").write_bytes(b"\x08" + bytes(20))
    with pytest.raises(UserError, match=r"cannot read weights=.*bert for BertForSequenceClassification: "):
        load("transformers", tmp_path / "bert", (6,), 2)


def test_transformer_of_a_hub_that_cannot_be_reached_raises_one_line(monkeypatch, caplog, capsys):
    pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"no such folder, and from the Hugging Face hub: We couldn't connect"
    ) as caught:
        build_model("transformers", input_shape=(6,), num_classes=2, weights="nobody/model")
    assert str(caught.value).startswith("cannot read weights=nobody/model for sequence_classification: there is")
    assert "\n" not in str(caught.value)
    assert (caplog.text, *capsys.readouterr()) == ("", "", "")


def test_structure_of_a_transformer_without_values_reads_only_its_config(tmp_path):
    bert(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with init_empty():
        model = build_model("transformers", input_shape=(6,), num_classes=2, weights=str(tmp_path))
    assert all(part.is_meta for part in model.parameters())


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_of_a_file_are_loaded_and_what_is_new_is_told(tmp_path, caplog, suffix):
    torch.manual_seed(0)
    path = tmp_path / f"weights{suffix}"
    source = build_model("mlp", input_shape=(8,), num_classes=4, hidden=[16]).state_dict()
    save = safetensors.torch.save_file if suffix == ".safetensors" else torch.save
    save(source | {"extra": torch.ones(2)}, path)
    with caplog.at_level(logging.INFO):
        model = load("mlp", path, (8,), 7, hidden=[16])
    assert torch.equal(model[1].weight, source["1.weight"])
    assert f"loaded 2 tensors of {path}; of another shape, so new: 3.weight, 3.bias; not in the model: extra" in (
        caplog.text.replace("3.bias, 3.weight", "3.weight, 3.bias")
    )


def test_weights_of_another_model_or_file_raise_one_line(tmp_path):
    other = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"blocks.0": torch.ones(3)}, other)
    (tmp_path / "text.pt").write_text("text")
    (tmp_path / "weights.csv").write_text("1")
    torch.save([1, 2], tmp_path / "list.pt")
    for path, message in (
        (other, "is of another model: 0 of its 1 tensors fit. It has blocks.0; the model has 1.weight"),
        (tmp_path / "text.pt", "cannot be read"),
        (tmp_path / "none.safetensors", "cannot be read"),
        (tmp_path / "weights.csv", "is no file of weights; its name ends in one of .safetensors"),
        (tmp_path / "list.pt", "holds a list, not named tensors"),
        ("hf://a/b/c.safetensors", "weights=hf://?a/b/c.safetensors is a URL, which is not read; download it"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            load("mlp", path, (8,), 4)
        assert "\n" not in str(caught.value)


def test_timm_model_loads_a_file_for_other_classes(tmp_path):
    timm = pytest.importorskip("timm")
    source = timm.create_model("resnet10t", num_classes=5, in_chans=1)
    safetensors.torch.save_file(source.state_dict(), tmp_path / "weights.safetensors")
    model = load("timm", tmp_path / "weights.safetensors", (1, 32, 32), 3, architecture="resnet10t")
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 3)
    assert torch.equal(model.conv1[0].weight, source.conv1[0].weight)
    with pytest.raises(UserError, match=r"timm cannot make architecture=resnet9000"):
        build_model("timm", input_shape=(1, 8, 8), num_classes=2, architecture="resnet9000")


def test_timm_resamples_position_embeddings_for_another_size(tmp_path):
    timm = pytest.importorskip("timm")
    source = timm.create_model("test_vit", num_classes=5, img_size=64)
    torch.save(source.state_dict(), tmp_path / "vit.pth")
    model = load("timm", tmp_path / "vit.pth", (3, 32, 32), 5, architecture="test_vit", image_size=32)
    expected = timm.layers.resample_abs_pos_embed(source.pos_embed.detach(), (2, 2))
    assert torch.equal(model.pos_embed, expected)
    assert torch.equal(model.head.weight, source.head.weight)


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (3, 5)])
def test_timm_adapts_the_first_layer_to_other_channels(tmp_path, before, after):
    timm = pytest.importorskip("timm")
    source = timm.create_model("resnet10t", num_classes=5, in_chans=before)
    safetensors.torch.save_file(source.state_dict(), tmp_path / "conv.safetensors")
    model = load("timm", tmp_path / "conv.safetensors", (after, 32, 32), 5, architecture="resnet10t")
    expected = timm.models.adapt_input_conv(after, source.conv1[0].weight.detach(), base_chans=before)
    assert torch.equal(model.conv1[0].weight, expected)
    assert torch.equal(model.fc.weight, source.fc.weight)


@pytest.mark.parametrize("kind", ["module", "model", "timm"])
def test_timm_reads_files_of_other_trainers(tmp_path, kind):
    timm = pytest.importorskip("timm")
    source = timm.create_model("resnet10t", num_classes=5)
    state = source.state_dict()
    stored = {
        "module": {f"module.{name}": value for name, value in state.items()},
        "model": {"model": state, "epoch": 3},
        "timm": {"state_dict": state, "args": argparse.Namespace(lr=1.0), "arch": "resnet10t"},
    }[kind]
    torch.save(stored, tmp_path / "weights.pth")
    model = load("timm", tmp_path / "weights.pth", (3, 32, 32), 5, architecture="resnet10t")
    assert torch.equal(model.layer1[0].conv1.weight, source.layer1[0].conv1.weight)


def test_timm_refuses_weights_of_another_architecture(tmp_path):
    timm = pytest.importorskip("timm")
    torch.save(timm.create_model("resnet10t", num_classes=5).state_dict(), tmp_path / "weights.pth")
    for classes in (5, 3):
        with pytest.raises(UserError, match=r"timm cannot load weights=.*pth: Error.* Missing key"):
            load("timm", tmp_path / "weights.pth", (3, 32, 32), classes, architecture="resnet18")


def test_transformer_without_the_package_names_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(ImportError, match="the model transformers needs a package: pip install transformers"):
        build_model("transformers", input_shape=(6,), num_classes=2, weights="x")
    assert isinstance(build_model("mlp", input_shape=(6,), num_classes=2), nn.Module)


@pytest.mark.real
def test_real_encoder_for_causal_lm_reads_in_one_direction(real_data):
    weights = real_data("minilm") / "minilm"
    model = load("transformers", weights, (8,), 30522, task="causal_lm")
    ids = torch.randint(1000, 30000, (1, 8))
    changed = ids.clone()
    changed[0, -1] = 999
    torch.testing.assert_close(model(ids)[0, :7], model(changed)[0, :7], rtol=1e-5, atol=1e-5)
    assert not torch.equal(model(ids)[0, 7], model(changed)[0, 7])
