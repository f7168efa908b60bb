"""The study of fine-tuning: every method can be configured, runs once, and the table comes from the curves."""

import json
from importlib import import_module

import pytest
import torch
from safetensors.torch import load_file

from models import build_model, load_pretrained
from studies import finetune, full_rank
from studies.curves import by_scheme, read_curves
from studies.peers.federation import run_all
from studies.runner import Arguments
from train.config.schema import load_config
from train.experiment.assembly import make_model, read_dataset

TINY = {
    **{"data.partition.alpha": 1, "strategy": "top_n", "residual": "int4"},
    **{"rounds": 3, "evaluate_every": 1, "model": "{name: mlp, hidden: [16, 16, 16]}", "local.epochs": 1},
    **{"engine": "sequential", "server_optimizer": "plain", "result": "last"},
}


@pytest.fixture
def registered(registries_as_before):
    """The parts of `studies.sentences` are registered during a test."""
    import_module("studies.sentences")


def experiment(**methods):
    setting = finetune.Scenario({0.2: 0.6, 0.4: 0.4}, TINY, [[*methods]])
    return finetune.FineTuning("quickstart", "a test", 50, lambda _: {"": {}}, {"uneven, α = 1": setting}, methods)


@pytest.mark.parametrize("name", finetune.EXPERIMENTS | full_rank.EXPERIMENTS)
def test_every_method_of_every_setting_is_a_valid_configuration(name, registered):
    study, seen = (finetune.EXPERIMENTS | full_rank.EXPERIMENTS)[name], []
    for setting in study.settings.values():
        for method in (study.methods[name] for wave in setting.waves for name in wave):
            values = {"model.weights": "x", **setting.overrides_of(method), **method.at(method.rates[0])}
            config = load_config(finetune.CONFIGS / f"{study.config}.yaml", [f"{k}={v}" for k, v in values.items()])
            assert (config.result, config.server_optimizer.name, config.local.decay) == ("last", "plain", 0)
            assert sorted(method.rates) == [*method.rates]
            assert len(method.rates) == 5
            seen.append(method)
    assert all(method in seen for method in study.methods.values())


def test_study_tries_rates_on_held_out_samples_and_runs_once(tmp_path, monkeypatch, capsys):
    factors, arguments = (0.025, 0.05, 0.1, 0.2, 0.4), Arguments("finetune", tmp_path, seeds=(0, 1))
    study = experiment(
        top_n=finetune.Method(finetune.ours, factors),
        FLoRA=finetune.Method(finetune.flora, factors, {"residual": "float32"}),
    )
    finetune.run(study, arguments)
    text = (tmp_path / "summary.md").read_text(encoding="utf-8")
    trials, curves = (by_scheme(read_curves(tmp_path / file)) for file in ("rates.csv", "curves.csv"))
    assert set(trials.seed) == {1000}
    assert trials.rounds.max() == 1  # a third
    assert curves.scheme.nunique() == 2
    ends = trials.set_index("scheme").test_accuracy
    for method in ("top_n", "FLoRA"):
        accuracies = {rate: ends.get(f"uneven, α = 1, {method}, lr {rate}") for rate in factors}
        tried = {rate: accuracy for rate, accuracy in accuracies.items() if accuracy is not None}
        first = max(factors[1:4], key=lambda rate: tried[rate])
        assert {*tried} == {*factors[1:4]} | {0.05: {0.025}, 0.1: set(), 0.2: {0.4}}[first]
        best = max(tried, key=lambda rate: (tried[rate], rate in factors[1:4], -rate))
        assert set(curves[curves.scheme == f"uneven, α = 1, {method}, lr {best}"].seed) == {0, 1}
    lines = [
        json.loads(line)
        for path in (tmp_path / "runs").rglob("metrics.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert all(line["num_aggregated"] == line["num_clients"] for line in lines)
    monkeypatch.setattr("studies.runner.write_rounds", lambda *_: pytest.fail("it trains"))
    finetune.run(study, arguments)
    finetune.run(study, Arguments("finetune", tmp_path, only=()))
    assert (tmp_path / "summary.md").read_text(encoding="utf-8") == text
    row = next(line for line in text.splitlines() if "| FLoRA" in line and "0, 1" in line)
    percents = 100 * curves[curves.scheme.str.contains("FLoRA") & (curves.rounds == 3)].test_accuracy
    assert f"| {percents.mean():.1f} ± {percents.std():.1f} |" in row


def test_interrupted_run_starts_again_with_the_same_curve(tmp_path):
    configs = {
        name: load_config(
            "configs/quickstart.yaml", [*(f"{k}={v}" for k, v in TINY.items()), f"output={tmp_path / name}"]
        )
        for name in ("whole", "cut")
    }
    whole = run_all(finetune.ours, {"whole": configs["whole"]})
    (tmp_path / "cut").mkdir()
    first = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[0]
    (tmp_path / "cut" / "metrics.jsonl").write_text(first + "\n")
    cut = run_all(finetune.ours, {"cut": configs["cut"]})
    assert cut.test_accuracy.tolist() == whole.test_accuracy.tolist()
    assert cut.memory_most.iloc[0] > cut.memory_least.iloc[0]


def test_sentence_classifier_averages_the_states_of_tokens_that_are_not_padding(tmp_path, registered):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(1)
    reference = transformers.BertModel(transformers.BertConfig(vocab_size=30, **sizes)).eval()
    reference.save_pretrained(tmp_path)
    model = build_model("sentence_classifier", input_shape=(6,), num_classes=3, weights=str(tmp_path))
    load_pretrained("sentence_classifier", model, str(tmp_path))
    states = reference(input_ids=torch.tensor([[2, 7, 9]])).last_hidden_state
    expected = model.head(30 * states.mean(1))
    assert model.head.weight.abs().max() <= 1 / 30 / 4
    torch.testing.assert_close(model.eval()(torch.tensor([[2, 7, 9, 0, 0, 0]])), expected, rtol=1e-5, atol=1e-6)
    frozen = {name for name, part in model.named_parameters() if not part.requires_grad}
    assert frozen == {f"encoder.embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")}


@pytest.mark.slow
def test_networks_are_pretrained_once_and_their_weights_but_the_head_are_loaded(
    tmp_path, drawn_data, started, monkeypatch
):
    monkeypatch.setenv("SHARDING_DATA", str(drawn_data))
    weights = finetune.pretrained(Arguments("finetune_vision", tmp_path))
    assert finetune.pretrained(Arguments("finetune_vision", tmp_path)) == weights
    assert started == ["pretrained-0", "pretrained-narrow-0"]
    for method, width in (("", 32), ("small sibling", 10)):
        words = [f"{key}={value}" for key, value in weights[method].items()]
        config = load_config(finetune.CONFIGS / "finetune_vision.yaml", words)
        model, stored = make_model(config, read_dataset(config)), load_file(weights[method]["model.weights"])
        assert model.conv1.weight.shape[0] == width
        assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items() if "fc." not in name)
        assert (len(stored["fc.bias"]), len(model.fc.bias)) == (100, 10)


def test_fedit_has_the_smallest_rank_of_each_setting_and_the_others_all_ranks():
    methods, uneven = finetune.EXPERIMENTS["finetune"].methods, finetune.Scenario({0.4: 0.3, 0.1: 0.7}, {}, [])
    assert uneven.overrides_of(methods["FedIT"])["keep_ratio"] == {0.1: 1}
    assert all(
        uneven.overrides_of(method)["keep_ratio"] == {0.4: 0.3, 0.1: 0.7}
        for name, method in methods.items()
        if name != "FedIT"
    )
