"""The commands of the guide on fine-tuning, on a small model and table; and what they refuse, in one line."""

import logging
import shutil

import pytest

from sharding import UserError
from tests.encoder import WORDS, write_encoder, write_table
from tests.train.runs import assert_same, cut_off, read
from train import load_model
from train.cli.commands import main
from train.config.schema import load_config
from train.experiment.assembly import assemble
from train.run import run

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("undrawn")

SMALL = [
    "rounds=2",
    "clients.count=4",
    "clients.per_round=4",
    "local.steps=2",
    "local.batch_size=4",
    "evaluate_every=1",
    "engine=sequential",
]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return a folder with `weights` and a table."""
    folder = tmp_path_factory.mktemp("finetune")
    write_encoder(folder / "weights", sum(WORDS.values(), ()))
    write_table(folder / "news.csv", ["space", "sport"])
    return folder


@pytest.fixture
def words(tables, tmp_path):
    """Return a function that returns the guide's arguments for a command, made small."""

    def make(*overrides, output="run"):
        keys = {word.partition("=")[0] for word in overrides}
        fixed = [f"data.train={tables / 'news.csv'}", f"model.weights={tables / 'weights'}", *SMALL]
        kept = [word for word in fixed if word.partition("=")[0] not in keys]
        return ["configs/finetune.yaml", *kept, *overrides, f"output={tmp_path / output}"]

    return make


def test_finetuning_of_a_table_trains_unequal_clients_and_names_what_is_new(words, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "models"):
        assert main(["run", *words(), "--quiet"]) == 0
    lines = read(tmp_path / "run")
    assert [line["num_aggregated"] for line in lines] == [4, 4]
    assert [len(line.get("new_clients", [])) for line in lines] == [4, 0]
    assert lines[0]["bytes_down"] > lines[1]["bytes_down"]
    assert "new: classifier.bias, classifier.weight" in caplog.text


def test_inspection_of_finetuning_has_memory_and_bytes(words, capsys):
    assert main(["inspect", *words()]) == 0
    told = capsys.readouterr().out
    assert "first contact: each client is sent " in told
    assert told.count("a client's tensors: ") == 2
    assert all(part in told for part in ("frozen ", "gradients ", "optimizer ", "activations "))


def test_finetuning_interrupted_and_resumed_in_processes_has_the_same_bits(words):
    def config(output, *overrides):
        path, *rest = words(*overrides, output=output)
        return load_config(path, [*rest, "checkpoint_every=1"])

    whole = run(config("one"))
    cut_off(config("two"), after=0)
    assert_same(run(config("two", "engine=processes"), resume=True), whole)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_length=65", "data.max_length=65 must be 1 to 64, which"),
        ("residual=null", "init=low_rank would cut off "),
        ("model.weights={folder}/news.csv", "there is no such folder, and from the Hugging Face hub: "),
    ],
)
def test_finetuning_with_a_mistake_exits_with_one_line(override, message, words, tables, capsys):
    assert main(["run", *words(override.format(folder=tables)), "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_run_has_all_of_its_model_after_the_weights_have_moved(tables, words, tmp_path):
    weights = tmp_path / "weights"
    shutil.copytree(tables / "weights", weights)
    assert main(["run", *words(f"model.weights={weights}", "local.schedule=constant"), "--quiet"]) == 0
    weights.rename(tmp_path / "moved")
    model = load_model(tmp_path / "run")
    assert model.class_names == ("space", "sport")
    assert model.model.config.id2label == {0: "space", 1: "sport"}
    resumed = [f"model.weights={tmp_path / 'moved'}", "local.schedule=constant", "rounds=3"]
    assert main(["run", *words(*resumed), "--resume", "--quiet"]) == 0
    assert len(read(tmp_path / "run")) == 3


def test_model_that_reads_what_it_predicts_is_refused(tables, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tables / "weights")
    sizes = {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 24, "vocab_size": len(tokenizer)}
    transformers.XLNetLMHeadModel(transformers.XLNetConfig(**sizes)).save_pretrained(tmp_path / "net")
    tokenizer.save_pretrained(tmp_path / "net")
    table = f"data={{name: files, train: {tables / 'news.csv'}, test_fraction: 0.2, max_length: 6, partition: iid}}"
    model = f"model={{name: transformers, weights: {tmp_path / 'net'}, task: causal_lm}}"
    config = load_config("configs/finetune.yaml", [model, table, "clients={count: 2, per_round: 2}"])
    with pytest.raises(UserError, match="the model transformers reads the tokens that it predicts"):
        assemble(config)
