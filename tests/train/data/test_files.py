"""A user's own files: each format and column by hand, mistakes in one line, and the real newsgroups."""

import csv
import gzip
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from sharding import UserError
from train import load_model
from train.cli.commands import main
from train.config.schema import load_config
from train.data import Dataset, load_dataset
from train.data.partition import partition
from train.data.tokens import Tokenizer
from train.experiment.assembly import partition_indices, read_dataset

transformers = pytest.importorskip("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c", "d"]
PAD, CLS, SEP, A, B, C, D = 0, 2, 3, 5, 6, 7, 8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the folder of a tokenizer with one id a letter."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer(str(folder / "vocab.txt"), model_max_length=8).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def load(tmp_path: Path, tokenizer: str) -> Callable[..., Dataset]:
    """Return a function that loads files of the test's folder, of rows of four ids."""

    def read(**options: Any) -> Dataset:
        given = {"train": "train.csv", "test": "test.csv"} | options
        return load_dataset("files", **{"root": tmp_path, "tokenizer": tokenizer, "max_length": 4} | given)

    return read


def write(path: Path, rows: Sequence[Sequence[Any]], names: Sequence[str] = ("text", "label")) -> None:
    """Write rows in the format that the file's name says."""
    records = [dict(zip(names, row, strict=True)) for row in rows]
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(records), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(records))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    else:
        with path.open("w", newline="") as file:
            csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([names, *rows])


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_files_of_each_format_are_padded_ids_and_sorted_classes(suffix, tmp_path, load):
    write(tmp_path / f"train.{suffix}", [("a", "x"), ("a b c d", "w"), ("b, c", "x")])
    write(tmp_path / f"test.{suffix}", [("d", "x")])
    data = load(train=f"train.{suffix}", test=f"test.{suffix}")
    assert data.train.inputs.tolist() == [[CLS, A, SEP, PAD], [CLS, A, B, SEP], [CLS, B, 1, SEP]]
    assert data.train.targets.tolist() == [1, 0, 1]
    assert (data.test.inputs.tolist(), data.test.targets.tolist()) == ([[CLS, D, SEP, PAD]], [1])
    assert (data.num_classes, data.class_names, data.pad_token_id) == (2, ("w", "x"), PAD)
    assert (data.input_shape, data.natural) == ((4,), None)


def test_files_of_a_glob_are_read_in_order_of_their_names(tmp_path, load):
    folder = tmp_path / "odd [1]"
    folder.mkdir()
    for name, letter in (("b.csv", "b"), ("a.csv", "a"), ("c.csv", "c")):
        write(folder / name, [(letter, 7)])
    assert load(train="odd [[]1]/*.csv", test="odd [1]/b.csv").train.inputs[:, 1].tolist() == [A, B, C]
    assert load(train=("odd [1]/c.csv", "odd [1]/a.csv"), test="odd [1]/b.csv").train.inputs[:, 1].tolist() == [C, A]


OTHER_CSV = {  # its content, options, and the names and targets of its classes
    "numbers": (b"text,label\na,10\nb,9\nc,-1\n", {}, ("-1", "9", "10"), [2, 1, 0]),
    "numbers in a given order": (
        b"text,label\na,10\nb,9\nc,-1\n",
        {"classes": (9, 10, -1)},
        ("9", "10", "-1"),
        [1, 0, 2],
    ),
    "text of digits": (b"text,label\n007,1.5\n7,NaN\n", {}, ("1.5", "NaN"), [0, 1]),
    "words that mean missing elsewhere": (b"text,label\na,NA\nb,None\n", {}, ("NA", "None"), [0, 1]),
    "another encoding and separator": (
        "téxt;label\na;é\n".encode("latin-1"),
        {"separator": ";", "encoding": "latin-1", "text": "téxt"},
        ("é",),
        [0],
    ),
}


@pytest.mark.parametrize(("content", "options", "names", "targets"), OTHER_CSV.values(), ids=OTHER_CSV)
def test_csv_of_another_kind_has_its_classes(content, options, names, targets, tmp_path, load):
    (tmp_path / "train.csv").write_bytes(content)
    data = load(test="train.csv", **options)
    assert (data.class_names, data.train.targets.tolist()) == (names, targets)


def test_files_with_named_classes_in_their_metadata_keep_the_order(tmp_path, load):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["z", "y"])})
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features)
    table.to_parquet(tmp_path / "train.parquet")
    write(tmp_path / "test.csv", [("a", "y")])
    data = load(train="train.parquet")
    assert (data.class_names, data.train.targets.tolist(), data.test.targets.tolist()) == (("z", "y"), [0, 1], [1])


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_files_with_leading_zeros_in_classes_and_clients_keep_them(suffix, tmp_path, load):
    rows = [("a", ["01", "1", "02"][i % 3], ["007", "07", "7"][i % 3]) for i in range(6)]
    write(tmp_path / f"train.{suffix}", rows, ("text", "label", "site"))
    data = load(train=f"train.{suffix}", test=f"train.{suffix}", client="site")
    assert (data.class_names, data.client_names) == (("01", "02", "1"), ("007", "07", "7"))
    assert [part.tolist() for part in data.natural or ()] == [[0, 3], [1, 4], [2, 5]]


def test_files_sort_clients_as_numbers_if_all_are_whole(tmp_path, load):
    write(tmp_path / "train.csv", [("a", 0, site) for site in (10, 9, -1)], ("text", "label", "site"))
    assert load(test="train.csv", client="site").client_names == ("-1", "9", "10")
    write(tmp_path / "train.csv", [("a", 0, site) for site in (10, 9, "x")], ("text", "label", "site"))
    assert load(test="train.csv", client="site").client_names == ("10", "9", "x")


def test_files_read_the_named_columns_only_whatever_the_others_and_later_rows_have(tmp_path, load):
    rows = [("a", 0 if i < 11_000 else "x", i if i < 11_000 else "n/a", "") for i in range(12_000)]
    write(tmp_path / "train.csv", rows, ("text", "label", "note", "empty"))
    write(tmp_path / "more.csv", [("c", "z", 1)], ("label", "text", "other"))
    data = load(train=("train.csv", "more.csv"), test="train.csv")
    assert (data.class_names, len(data.train)) == (("0", "c", "x"), 12_001)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "json", "parquet"])
def test_files_read_dates_as_words(suffix, tmp_path, load):
    rows = [("2024-01-01", f"2024-01-0{1 + i % 2}", f"2024-01-0{1 + i % 3}T10:00:00") for i in range(6)]
    write(tmp_path / f"train.{suffix}", rows, ("text", "label", "day"))
    data = load(train=f"train.{suffix}", test=f"train.{suffix}", client="day")
    assert data.class_names == ("2024-01-01", "2024-01-02")
    assert data.client_names == tuple(f"2024-01-0{day}T10:00:00" for day in (1, 2, 3))


def test_parquet_reads_whole_floats_decimals_dates_and_categories_as_text(tmp_path, load):
    for values, names in (
        (pa.array([1.0, 2.0]), ("1", "2")),
        (pa.array([Decimal("10"), Decimal("9")]), ("9", "10")),
        (pa.array([date(2024, 1, 1), date(2024, 1, 2)]), ("2024-01-01", "2024-01-02")),
        (pa.array([date(2024, 1, 1)] * 2).cast("timestamp[ns]"), ("2024-01-01 00:00:00",)),
        (pa.array(["w", "v"]).dictionary_encode(), ("v", "w")),
        (pa.array([True, False]), ("False", "True")),
    ):
        parquet.write_table(pa.table({"text": ["a", "b"], "label": values}), tmp_path / "train.parquet")
        assert load(train="train.parquet", test="train.parquet").class_names == names
    parquet.write_table(pa.table({"text": ["a", "b"], "label": [1.0, 0.5]}), tmp_path / "train.parquet")
    with pytest.raises(UserError, match="1 of 2 rows have neither a whole number nor a word in the column label"):
        load(train="train.parquet", test="train.parquet")


OTHER_JSON = {
    '{\n"data": [{"text": "a"}]}': r"cannot read .*train\.json as json: line 1: .*; write an object in each line",
    '{"data": [{"text": "a"}]}': r"train\.json has no column 'label', but data; set data\.label=…$",
    '[{"text": "a", "label": 1}, 2]': "row 2 is 2, not an object with names",
    '[{"text": "a", "label": 1}, {"text": "b", "label": "x"}]': "label",
    '[{"text": "a", "label": 1}, {"text": 3, "label": 1}]': "text",
    '{"text":': r"cannot read .*train\.json as",
}


@pytest.mark.parametrize(("content", "words"), OTHER_JSON.items())
def test_json_that_is_no_list_of_like_objects_says_where(content, words, tmp_path, load):
    (tmp_path / "train.json").write_text(content)
    with pytest.raises(UserError, match=words):
        load(train="train.json", test="train.json")


def test_files_that_are_compressed_or_end_in_ndjson(tmp_path, load):
    (tmp_path / "train.csv.gz").write_bytes(gzip.compress(b"text,label\na,x\n"))
    (tmp_path / "test.ndjson").write_text('{"text": "b", "label": "x"}\n\n')
    data = load(train="train.csv.gz", test="test.ndjson")
    assert (data.train.inputs[0, 1], data.test.inputs[0, 1]) == (A, B)


def test_message_names_the_file_of_several_and_the_row_in_it(tmp_path, load):
    write(tmp_path / "a.csv", [("a", "x"), ("b", "x")])
    write(tmp_path / "b.csv", [("a", "x"), ("b", "")])
    with pytest.raises(UserError, match=r"1 of 4 rows have no value .* label, the first is row 2 of .*b\.csv"):
        load(train=("a.csv", "b.csv"), test="a.csv")
    write(tmp_path / "b.csv", [("a",)], ["text"])
    with pytest.raises(UserError, match=r"b\.csv has no column 'label', but text; set data\.label"):
        load(train=("a.csv", "b.csv"), test="a.csv")


def test_files_with_classes_of_the_model_have_its_order(tmp_path, load):
    names = {0: "Positive", 1: "negative", 2: "mixed"}
    transformers.BertConfig(vocab_size=len(WORDS), id2label=names).save_pretrained(tmp_path / "net")
    write(tmp_path / "train.csv", [("a", "mixed"), ("b", "negative"), ("c", "positive")])
    options = {"test": "train.csv", "weights": str(tmp_path / "net")}
    data = load(**options)
    assert (data.class_names, data.train.targets.tolist()) == (("positive", "negative", "mixed"), [2, 1, 0])
    message = r"is not the order of the weights' own classes; .* data\.classes=\[positive, negative, mixed\]"
    with pytest.raises(UserError, match=message):
        load(**options, classes=("mixed", "negative", "positive"))
    write(tmp_path / "train.csv", [("a", "mixed"), ("b", "negative"), ("c", "other")])
    assert load(**options).class_names == ("mixed", "negative", "other")


def test_files_with_ids_that_the_model_lacks_raise_before_training(tmp_path, load):
    transformers.BertConfig(vocab_size=len(WORDS) - 1).save_pretrained(tmp_path / "net")
    write(tmp_path / "train.csv", [("a", 0), ("b c", 0)])
    write(tmp_path / "test.csv", [("a", 0), ("b d", 0)])
    assert len(load(test="train.csv", weights=str(tmp_path / "net")).train) == 2
    with pytest.raises(UserError, match="the tokenizer has 9 ids and the model 8: 'd' of text 2 or its padding"):
        load(weights=str(tmp_path / "net"))


def test_texts_are_padded_where_the_model_does_not_read(tmp_path, load, tokenizer):
    write(tmp_path / "train.csv", [("a", "x"), ("b c d", "y")])
    right, left = [CLS, A, SEP, PAD], [PAD, CLS, A, SEP]
    transformers.BertConfig(vocab_size=len(WORDS)).save_pretrained(tmp_path / "bert")
    transformers.XLNetConfig(vocab_size=len(WORDS)).save_pretrained(tmp_path / "xlnet")
    for side in ("right", "left"):
        sided = str(tmp_path / side)
        transformers.AutoTokenizer.from_pretrained(tokenizer, padding_side=side).save_pretrained(sided)
        for net, row in ((None, left if side == "left" else right), ("bert", right), ("xlnet", left)):
            weights = None if net is None else str(tmp_path / net)
            data = load(test="train.csv", weights=weights, tokenizer=sided)
            assert data.train.inputs.tolist() == [row, [CLS, B, C, SEP]], (side, net)


def test_files_with_one_class_are_warned_of(tmp_path, load, caplog):
    write(tmp_path / "train.csv", [("a", "x"), ("b", "x")])
    load(test="train.csv")
    assert "all samples have the class x" in caplog.text


def test_config_implies_the_tokenizer_and_each_client_has_the_rows_of_one_value(tmp_path, tokenizer):
    rows = [("a", 0, "zoe"), ("b", 1, "ann"), ("c", 0, "zoe"), ("d", 1, "ann"), ("a", 1, "bob")]
    write(tmp_path / "train.csv", rows, ("text", "label", "author"))
    path = tmp_path / "c.yaml"
    path.write_text(
        "{name: c, rounds: 1, model: mlp, clients: {count: 3, per_round: 1}, data: {name: files, max_length: 4, "
        f"root: {tmp_path}, train: train.csv, test: train.csv, tokenizer: {tokenizer}, "
        "partition: {name: column, column: author}}}"
    )
    config = load_config(path)
    parts = partition_indices(config, read_dataset(config))
    assert [part.tolist() for part in parts] == [[1, 3], [4], [0, 2]]
    config = load_config(path, ["clients.count=4"])
    with pytest.raises(UserError, match=r"clients\.count=4 is more than the 3 values in the column author"):
        partition_indices(config, read_dataset(config))
    own = shutil.copytree(tokenizer, tmp_path / "own")
    transformers.BertConfig(vocab_size=len(WORDS)).save_pretrained(own)
    implied = load_config(path, [f"model={{name: transformers, weights: {own}}}", "data.tokenizer=null"])
    assert torch.equal(read_dataset(implied).train.inputs, read_dataset(config).train.inputs)
    with pytest.raises(UserError, match="has no column 'writer', but text, label, author"):
        read_dataset(load_config(path, ["data.partition.column=writer"]))
    with pytest.raises(UserError, match=r"data\.partition=column needs data=files, .*digits has none"):
        load_config(path, ["data=digits", "data.partition={name: column, column: author}"])


def test_files_with_a_test_fraction_hold_out_training_samples(tmp_path, load):
    write(tmp_path / "train.csv", [(letter, letter) for letter in "abcd" * 5])
    first, again, other = (load(test=None, test_fraction=0.25, seed=seed) for seed in (0, 0, 1))
    assert (len(first.train), len(first.test)) == (15, 5)
    assert torch.equal(first.test.inputs, again.test.inputs)
    assert not torch.equal(first.test.inputs, other.test.inputs)
    both = torch.cat([first.train.targets, first.test.targets])
    assert both.bincount().tolist() == [5, 5, 5, 5]


def test_files_with_too_large_a_test_fraction_raise(tmp_path, load):
    write(tmp_path / "train.csv", [("a", 0, "x"), ("b", 1, "y"), ("c", 1, "y")], ("text", "label", "author"))
    with pytest.raises(UserError, match=r"data\.test_fraction=0\.6, 2 samples, must be at most 1"):
        load(test=None, test_fraction=0.6, client="author")


def test_files_without_training_samples_cannot_be_divided(tmp_path, load):
    write(tmp_path / "test.csv", [("a", 0)])
    data = load(train=None, classes=(0, 1))
    assert (len(data.train), data.num_classes) == (0, 2)
    with pytest.raises(UserError, match="files has no training samples to divide"):
        partition("iid", data, 2, np.random.default_rng(0))


def test_files_for_causal_lm_are_packed_blocks_with_the_ids_that_follow(tmp_path, load):
    write(tmp_path / "train.csv", [("a b",), ("c d a",)], ["text"])
    write(tmp_path / "test.csv", [("a b",)], ["text"])
    data = load(task="causal_lm")
    assert data.train.inputs.tolist() == [[CLS, A, B, SEP], [CLS, C, D, A]]
    assert data.train.targets.tolist() == [[A, B, SEP, CLS], [C, D, A, SEP]]
    assert data.test.inputs.tolist() == [[CLS, A, B, PAD]]
    assert data.test.targets.tolist() == [[A, B, SEP, -100]]
    assert (data.num_classes, data.ignore_index, data.natural) == (len(WORDS), -100, None)


def test_files_for_causal_lm_end_texts_with_the_end_token_and_pad_with_it(tmp_path, load, tokenizer):
    made = transformers.AutoTokenizer.from_pretrained(tokenizer)
    made.add_special_tokens({"eos_token": "d"})
    made.pad_token = None
    made.save_pretrained(tmp_path / "gpt")
    write(tmp_path / "train.csv", [("a",)], ["text"])
    data = load(test="train.csv", task="causal_lm", tokenizer=str(tmp_path / "gpt"), max_length=5)
    assert data.train.inputs.tolist() == [[CLS, A, SEP, D, D]]
    assert data.train.targets.tolist() == [[A, SEP, D, -100, -100]]
    assert data.pad_token_id == D


def test_files_for_causal_lm_pack_no_two_clients_in_one_block(tmp_path, load):
    write(tmp_path / "train.csv", [("a", "z"), ("b", "y"), ("c", "z")], ["text", "author"])
    write(tmp_path / "test.csv", [("a b",)], ["text"])
    data = load(task="causal_lm", client="author")
    assert [part.tolist() for part in data.natural or []] == [[0], [1, 2]]
    assert data.train.inputs.tolist() == [[CLS, B, PAD, PAD], [CLS, A, SEP, CLS], [C, PAD, PAD, PAD]]


def test_text_files_are_one_text_each(tmp_path, load):
    for name, text in (("1.txt", "a b\n\nc"), ("2.txt", "d")):
        (tmp_path / name).write_text(text)
    data = load(train="[12].txt", test="2.txt", task="causal_lm", max_length=8)
    assert data.train.inputs.tolist() == [[CLS, A, B, C, SEP, CLS, D, PAD]]


def draw(path: Path, value: int, size: tuple[int, int] = (4, 4), mode: str = "RGB") -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, 0, 0)).save(path)


def test_images_that_lose_pages_or_grays_are_told_of(tmp_path, load, caplog):
    from PIL import Image

    (tmp_path / "train/x").mkdir(parents=True)
    values = np.array([[0, 4095], [255, 256]], dtype=np.uint16)
    page = Image.fromarray(values)
    page.save(tmp_path / "train/x/a.tif", save_all=True, append_images=[page])
    data = load(train="train", test="train")
    assert data.train.inputs.tolist() == [[[[0, 15], [0, 1]]]]
    assert f"{tmp_path / 'train/x/a.tif'}: of its pages the first is used, as in all 1 such images" in caplog.text
    assert "16 bits have values up to 4095, of which 16 grays are left; stretch them to 65535" in caplog.text


def test_image_folder_has_a_class_for_each_subfolder_that_is_not_hidden(tmp_path, load):
    images = {"train/dog/a.png": 1, "train/cat/deep/b.png": 2, "test/dog/c.png": 3}
    hidden = {"train/.ipynb_checkpoints/a.png": 4, "train/dog/.cache/a.png": 5}
    for name, value in (images | hidden).items():
        draw(tmp_path / ".data" / name, value)
    (tmp_path / ".data/train/dog/._a.png").write_bytes(b"of a file manager")
    data = load(train=".data/train", test=".data/test")
    assert (data.class_names, data.input_shape) == (("cat", "dog"), (3, 4, 4))
    assert data.train.inputs[:, 0, 0, 0].tolist() == [2, 1]
    assert (data.train.targets.tolist(), data.test.targets.tolist()) == ([0, 1], [1])
    assert data.train.inputs.dtype == torch.uint8


def test_image_folder_has_all_images_that_pillow_reads_and_counts_the_others(tmp_path, load, caplog):
    for name in ("x/a.png", "x/b.ppm", "y/c.jfif", "y/d.avif"):
        draw(tmp_path / "train" / name, 1)
    shutil.copy(tmp_path / "train/x/a.png", tmp_path / "train/y/noend")
    (tmp_path / "train/x/notes.txt").write_text("none")
    assert load(train="train", test="train").train.targets.tolist() == [0, 0, 1, 1, 1]
    assert "left out 1 files that are no images: " in caplog.text
    assert str(tmp_path / "train/x/notes.txt") in caplog.text


def test_image_folder_with_a_class_without_images_or_of_splits_raises(tmp_path, load):
    draw(tmp_path / "a/x/a.png", 1)
    (tmp_path / "a/y").mkdir()
    (tmp_path / "a/y/b.heic").write_bytes(b"not readable")
    (tmp_path / "a/z").mkdir()
    (tmp_path / "a/__MACOSX").mkdir()
    with pytest.raises(UserError, match="a has no images in y, z; remove what is no class, or add its images"):
        load(train="a", test="a")
    draw(tmp_path / "b/train/x/a.png", 1)
    draw(tmp_path / "b/val/x/a.png", 1)
    with pytest.raises(
        UserError, match=r"b has splits, not classes: name .*b/train, .*b/val as data\.train and data\.test"
    ):
        load(train="b", test="b")


def test_image_that_is_damaged_is_named(tmp_path, load):
    for name in ("x/a.png", "y/b.jpg", "y/c.jpg"):
        draw(tmp_path / "train" / name, 1, (64, 64))
    whole = (tmp_path / "train/y/c.jpg").read_bytes()
    for content in (whole[:-100], b"", b"<html>"):
        (tmp_path / "train/y/c.jpg").write_bytes(content)
        with pytest.raises(UserError, match=r"cannot read .*train/y/c\.jpg: .*replace it with a valid copy"):
            load(train="train", test="train")
    records = [({"bytes": content, "path": None}, 1) for content in (whole, whole[:-100])]
    write(tmp_path / "train.parquet", records, ["img", "label"])
    with pytest.raises(UserError, match=r"cannot read .*train\.parquet, column img, row 2: "):
        load(train="train.parquet", test="train.parquet", image="img")
    write(tmp_path / "train.csv", [(tmp_path / "train/x/a.png", 1), (tmp_path / "train/y/c.jpg", 1)], ["img", "label"])
    with pytest.raises(UserError, match=r"cannot read .*train\.csv, column img, row 2: "):
        load(train="train.csv", test="train.csv", image="img")


def test_images_have_the_given_shape(tmp_path, load):
    draw(tmp_path / "gray/x/a.png", 9, mode="L")
    draw(tmp_path / "color/x/a.png", 9)
    assert load(train="gray", test="gray", shape=(3, 4, 4)).train.inputs[0, :, 0, 0].tolist() == [9, 9, 9]
    assert load(train="color", test="color", shape=(1, 4, 4)).input_shape == (1, 4, 4)
    with pytest.raises(UserError, match=r"gray/x/a\.png has 4x4 pixels, not 6x6; set data\.size"):
        load(train="gray", test="gray", shape=(3, 6, 6))


def test_image_folder_with_other_sizes_needs_a_size(tmp_path, load):
    draw(tmp_path / "train/x/a.png", 9, (4, 4), "L")
    draw(tmp_path / "train/x/b.png", 9, (6, 2), "L")
    with pytest.raises(UserError, match="6x2 pixels, not 4x4"):
        load(train="train", test="train")
    data = load(train="train", test="train", size=3)
    assert data.train.inputs.shape == (2, 1, 3, 3)
    assert (data.train.inputs == 9).all()


def test_image_folder_with_a_color_image_after_gray_ones_is_in_color(tmp_path, load):
    for name, mode in (("train/x/a.png", "L"), ("train/x/b.png", "RGB"), ("test/x/a.png", "L")):
        draw(tmp_path / name, 9, (8, 8), mode)
    data = load(train="train", test="test")
    assert data.input_shape == (3, 8, 8)
    assert data.train.inputs[:, :, 0, 0].tolist() == [[9, 9, 9], [9, 0, 0]]
    assert load(train="test", test="train").input_shape == (3, 8, 8)


def test_files_with_an_image_column_equal_their_pixels(tmp_path, load):
    draw(tmp_path / "a.png", 5)
    column = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    write(tmp_path / "train.parquet", [(column, 1)], ["img", "label"])
    data = load(train="train.parquet", test="train.parquet", image="img")
    assert data.train.inputs[0, :, 0, 0].tolist() == [5, 0, 0]


GOOD = "text,label\na,x\nb,y\n"


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (GOOD, {"text": "txt"}, "has no column 'txt', but text, label; set data.text="),
        (GOOD, {"label": "lab"}, "has no column 'lab', but text, label; set data.label="),
        (GOOD, {"client": "author"}, "has no column 'author', but text, label; set data.partition.column="),
        (GOOD, {"image": "text"}, r"train\.csv, column text, row 1 is no image: .*No such file"),
        (GOOD, {"max_length": 9}, "data.max_length=9 must be 1 to 8"),
        (GOOD, {"max_length": 0}, "data.max_length=0 must be 1 to 8"),
        (GOOD, {"tokenizer": "/nowhere"}, "cannot read data.tokenizer='/nowhere': there is no such folder, and from"),
        (GOOD, {"tokenizer": None}, "needs data.tokenizer="),
        (GOOD, {"train": "no*.csv"}, "no file .*no\\*.csv; set data.train"),
        (GOOD, {"train": None, "test": None}, "needs data.train"),
        *((GOOD, {key: value}, f"data.{key} is empty; give paths") for key in ("train", "test") for value in ("", ())),
        (GOOD, {"classes": ()}, "data.classes is empty; name the classes"),
        (GOOD, {"test": "https://a.org/b.csv"}, "data.test=https://a.org/b.csv is a URL, which is not read; download"),
        (GOOD, {"test": None}, "either data.test=… or data.test_fraction"),
        (GOOD, {"test": None, "test_fraction": 1.5}, "data.test_fraction=1.5"),
        (GOOD, {"test_fraction": 0.2}, "data.test=… and data.test_fraction=… are both set; set one of them to null"),
        ("text\na\n", {"task": "causal_lm", "test": None, "test_fraction": 0.2}, "needs clients with two samples"),
        (GOOD, {"classes": ("x",)}, "has the classes y, which data.classes lack"),
        (GOOD, {"classes": ("x", "y", "y")}, "data.classes names y more than once; name each class once"),
        (GOOD, {"train": "train.odd"}, "no file"),
        (GOOD, {"train": "folder"}, "has no images; .*Tables are named by their files, as .*folder/\\*\\.csv"),
        (GOOD, {"train": ("train.csv", "damaged.parquet")}, "files of the kinds .csv, .parquet"),
        ("text;label\na;x\n", {}, "has no column 'label', but text;label; .* set data.separator"),
        ("text,label\n,x\nb,y\n,y\n", {}, "2 of 3 rows have no value in the column text, the first is row 1"),
        ("text,label\na,\nb,y\n", {}, "1 of 2 rows have no value in the column label, the first is row 1"),
        ('text,label\n" ",x\n', {}, "1 of 1 rows have an empty text in text"),
        (
            "text,label\na,x\n1,2,3\n",
            {},
            r"cannot read .*train\.csv as csv: line 3: it has 3 fields, and the header has 2",
        ),
        ('text,label\n"a\nb",x\n\n1\n', {}, r"csv: line 5: it has 1 fields, and the header has 2"),
        ('text,label\n"a,x\nb",y\n"c,x\n', {}, r"csv: line 4: unexpected end of data; correct it, or the quotes"),
        ('text,label\n"a" b,x\n', {}, r"csv: line 2: ',' expected after"),
        ("text,label,text\na,x,b\n", {}, r"train\.csv has 2 columns 'text'; rename all but one"),
        ("text,label\na,é\n".encode("latin-1"), {}, "set data.encoding"),
        (GOOD, {"encoding": "latinx"}, "unknown encoding: latinx"),
        ("text,label\n", {}, "train.csv has no rows"),
        ("", {}, "train.csv is empty"),
        ("text,label\na,y\n", {}, r"test\.csv has the classes x, which the training files lack; they have y"),
        (GOOD, {"train": "damaged.parquet"}, r"cannot read .*damaged\.parquet as"),
    ],
)
def test_files_with_a_mistake_raise_one_line(content, options, words, tmp_path, load):
    (tmp_path / "train.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "test.csv").write_text("text,label\na,x\n")
    (tmp_path / "damaged.parquet").write_text("PAR1")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "own.csv").write_text(GOOD)
    with pytest.raises(UserError, match=words):
        load(**options)


def test_texts_without_transformers_raise_importerror(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs Hugging Face's transformers: pip install 'spectral-sharding\[transf"):
        Tokenizer("somewhere", 4)


CONFIG = """
{name: mine, rounds: 2, model: {name: gpt_tiny, width: 8, depth: 1, heads: 2}, engine: sequential,
clients: {count: 2, per_round: 2},
data: {name: files, train: train.csv, test_fraction: 0.2, partition: {name: column, column: author},
       task: causal_lm, max_length: 4}}
"""


@pytest.mark.usefixtures("undrawn")
def test_run_on_own_text_trains_and_evaluates(tmp_path, tokenizer, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.csv", [("a b c d " * 8, author) for author in "xyxy"], ["text", "author"])
    (tmp_path / "mine.yaml").write_text(CONFIG)
    assert main(["run", "mine.yaml", f"data.tokenizer={tokenizer}", "output=run", "--quiet"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert np.isfinite([line["test_loss"] for line in lines]).all()
    assert main(["run", "mine.yaml", f"data.tokenizer={tokenizer}", "output=b", "data.text=txt", "--quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no column 'txt', but text, author" in line


SITES = """
{name: mine, rounds: 1, model: {name: mlp, hidden: [8, 8]}, engine: sequential,
clients: {count: 2, per_round: 2}, local: {schedule: constant}, data: {name: files, train: images.csv,
image: image, test_fraction: 0.2, partition: {name: column, column: site}}}
"""


@pytest.mark.usefixtures("undrawn")
def test_run_on_own_files_records_the_names_and_resumes_with_the_same_samples_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for value in range(12):
        draw(tmp_path / f"{value}.png", value)
    rows = [(f"{value}.png", "yx"[value % 2], "ab c"[value % 3]) for value in range(12)]
    write(tmp_path / "images.csv", rows, ("image", "label", "site"))
    (tmp_path / "mine.yaml").write_text(SITES)
    assert main(["run", "mine.yaml", "output=run", "--quiet"]) == 0
    (clients,) = json.loads((tmp_path / "run" / "clients.json").read_text()).values()
    assert clients["class_names"] == ["x", "y"]
    assert len(clients["names"]) == 2
    assert {*clients["names"]} < {"a", "b", " "}
    model = load_model(tmp_path / "run")
    assert model.class_names == ("x", "y")
    assert main(["run", "mine.yaml", "output=run", "rounds=2", "--resume", "--quiet"]) == 0
    draw(tmp_path / "3.png", 200)
    assert main(["run", "mine.yaml", "output=run", "rounds=3", "--resume", "--quiet"]) == 2
    assert "run was started with other data than the present mine" in capsys.readouterr().err


@pytest.mark.real
def test_real_newsgroups_have_the_published_counts(real_data: Callable[..., Path]) -> None:
    root = real_data("newsgroups20")
    table, tokenizer = "newsgroups20/test.parquet", str(root / "minilm")
    data = load_dataset("files", root=root, train=table, test=table, tokenizer=tokenizer, max_length=32)
    assert (len(data.train), data.num_classes, data.class_names[0]) == (7528, 20, "alt.atheism")
    assert (data.train.inputs[:, 0] == 101).all()  # [CLS]
    assert int(data.train.inputs.max()) < 30522
    assert ((data.train.inputs == 102).sum(1) == 1).all()  # [SEP], also after a cut
