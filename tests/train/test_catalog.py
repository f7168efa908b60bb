"""Everything that can be wrong with a command line, told in one line, with exit code 2, and nothing written."""

import io
import logging
import sys
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from train.__main__ import main

CONFIGS = Path(__file__).parents[2] / "configs"
QUICKSTART = str(CONFIGS / "quickstart.yaml")
CIFAR = str(CONFIGS / "cifar10_small.yaml")
SHAKESPEARE = str(CONFIGS / "shakespeare_gpt.yaml")


@pytest.fixture(autouse=True)
def _console(monkeypatch, tmp_path):
    """An empty folder to work in, and no handlers left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger(), "handlers", list(logging.getLogger().handlers))


def refused(capsys, arguments, words):
    """Run a command that must be refused, and check how."""
    before = sorted(Path().rglob("*"))
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert len(error) < 2100
    assert words in error
    assert "━" not in out
    assert sorted(Path().rglob("*")) == before


FLAG = "true and false stand for no number"
FINITE = "input should be a finite number"
RANGE = "input should be"
NAME = "a plain name is needed"
PATH = "a path"
OVERRIDES = {
    **{
        f"{key}={value}": FLAG
        for key in ("seed", "rounds", "keep_ratio", "clip", "server_lr")
        for value in ("true", "no")
    },
    **{f"local.{key}=true": FLAG for key in ("epochs", "batch_size", "lr", "momentum", "frobenius_decay")},
    "clients.count=true": FLAG,
    "clients.per_round=true": FLAG,
    "clients.budget=true": FLAG,
    "data.alpha=true": FLAG,
    "data.uneven=[1, 2, true]": FLAG,
    "keep_ratio={true: 1}": FLAG,
    "keep_ratio={0.2: true}": FLAG,
    "name=yes": "stand for no number and no name",
    **{
        f"{key}={value}": "true or false is needed"
        for key in ("alignment", "data.download")
        for value in (1, 0, '"yes"')
    },
    "clients.replacement=1": "true or false is needed",
    **{
        f"{key}=.inf": FINITE
        for key in ("server_lr", "local.lr", "local.frobenius_decay", "data.alpha", "local.momentum")
    },
    **{
        f"{key}=.nan": RANGE
        for key in ("server_lr", "local.lr", "local.frobenius_decay", "data.alpha", "clip", "keep_ratio")
    },
    "clients.beta_over_alpha=.inf": FINITE,
    "clients.budget=.inf": FINITE,
    "network.compute=.inf": FINITE,
    "network.communicate=.nan": RANGE,
    "network.bandwidth=.inf": FINITE,
    "network.bandwidth=-1": "network.bandwidth is -1.0; a finite number above 0 is needed",
    "network.bandwidth=1e-320": "network.bandwidth is 1e-320; a finite number above 0 is needed",
    "network.compute=2": "network.compute=2.0 does nothing without network.bandwidth",
    "network.communicate=0": "network.communicate=0.0 does nothing without network.bandwidth",
    "network.profiles=p.csv": "network.profiles=p.csv does nothing without network.bandwidth",
    "aggregation.norm_bound=0.5": RANGE,
    "aggregation.norm_bound=.inf": FINITE,
    "aggregation.trim=0.5": "aggregation.trim=0.5: input should be less than 0.5",
    "aggregation.trim=-1": RANGE,
    "keep_ratio=0": "keep_ratio=0: input should be greater than 0",
    "keep_ratio=-0.1": RANGE,
    "keep_ratio=1.01": "keep_ratio=1.01: input should be less than or equal to 1",
    "keep_ratio=half": "keep_ratio='half': input should be a valid number",
    "keep_ratio=[0.2]": "keep_ratio=[0.2]: input should be a valid number",
    "keep_ratio={}": "the shares of keep_ratio {} sum to 0, not 1",
    "keep_ratio={2: 1}": "input should be less than or equal to 1",
    "keep_ratio={0.2: .nan}": RANGE,
    "keep_ratio={0.2: 0.5, 0.2: 0.5}": "the key 0.2 stands twice",
    "clients.count=10000000000": "less than or equal to 1000000",
    "clients.count=0": RANGE,
    "clients.count=1.5": RANGE,
    "clients.per_round=0": RANGE,
    "clients.per_round=21": "choose 1 to 20",
    "clients.sampler=full": "set clients.per_round=20",
    "clients.sampler=mmfl": "clients.budget is None",
    "clients.signal=norm": "clients.signal=norm does nothing for the sampler uniform",
    'clients.signal="a\\nb"': "clients.signal=a b does nothing",
    "local.epochs=100000000000000000000": "less than or equal to 10000",
    "rounds=1e400": RANGE,
    "rounds=" + "9" * 400: "less than or equal to 1000000000",
    "rounds=" + "9" * 5000: "as YAML",
    "rounds=0": RANGE,
    "rounds=2020-13-45": "as YAML",
    "rounds=[": "as YAML",
    "rounds=!!python/object/apply:os.system [true]": "as YAML",
    "model={name: mlp, name: cnn}": "the key 'name' stands twice",
    "model=mlp": "model='mlp': a section of keys is needed",
    "local=3": "local=3: a section of keys is needed",
    "tasks=3": "tasks=3: ",
    "name=": "name=None: input should be a valid string",
    "name=''": NAME,
    "name=../../x": NAME,
    "name=a/b": NAME,
    "name=.hidden": NAME,
    'name="a\\0b"': NAME,
    'name="a\\nb"': NAME,
    "name=" + "x" * 300: "bytes are allowed",
    "name=7": "name=7: input should be a valid string",
    "output=''": PATH,
    "output=' '": PATH,
    'output="/tmp/a\\0b"': "a path without control characters",
    'output="a\\nb"': "a path without control characters",
    "output=" + "x" * 300: "a shorter path is needed",
    "output=" + "x/" * 3000: "a shorter path is needed",
    "output=~nosuchuser/x": "there is no such user",
    "data.root=~nosuchuser/x": "there is no such user",
    'data.root="a\\0b"': "a path without control characters",
    "data.root=" + "x" * 300: "a shorter path is needed",
    "strategy=" + "x" * 100_000: "choose one of",
    "strategy=[top_n]": "input should be a valid string",
    "engine=[]": "input should be a valid string",
    "local.lrr=1": "did you mean 'local.lr'?",
    "clients.a=1": "unknown config key 'clients.a'",
    "=3": "cannot read the override",
    "a.b.c=3": "unknown config key 'a'",
    "tracking.wandb=on": RANGE,
    "local.precision=float16": "input should be 'float32' or 'bfloat16'",
}


@pytest.mark.parametrize(("override", "words"), OVERRIDES.items(), ids=[key[:40] for key in OVERRIDES])
def test_a_wrong_value(capsys, override, words):
    refused(capsys, ["run", QUICKSTART, override], words)


MMFL = ["clients.sampler=mmfl", "clients.budget=2"]
FEW = ["clients.sampler=mmfl", "clients.budget=1", "clients.per_round=1"]
ASSEMBLED = {
    "engine": (["engine=fast"], "unknown engine 'fast'"),
    "device": (["device=cudda"], "device 'cudda' is not to be had here"),
    "meta": (["device=meta"], "device 'meta' is not to be had here"),
    "another device": (["device=cuda:99"], "is not to be had here"),
    "model option": (["model.widht=3"], "no option 'widht' (did you mean 'width'?)"),
    "model value": (["model.width=true"], "must be a whole number"),
    "too wide": (["model.width=1000000000", "model.groups=1"], "cannot be built"),
    "too many clients": (["clients.count=2000"], "clients.count=2000 must be 1 to 1437"),
    "no time at all": (
        ["clients.sampler=wireless", "network.bandwidth=1", "network.compute=0", "network.communicate=0"],
        "times above 0 seconds are needed",
    ),
    "pachinko": (["data.partition=pachinko"], "pachinko needs superclasses"),
    "natural": (["data.partition=natural"], "natural needs data with clients of its own"),
    "task device": ([*MMFL, "tasks={a: {device: meta}}"], "device 'meta' is not to be had"),
    "task clients": (
        [*FEW, "tasks={b: {}, a: {data: {uneven: [10, 1000, 0.5]}}}"],
        "the tasks have different numbers of clients",
    ),
    "task clients, smaller first": (
        [*FEW, "tasks={a: {data: {uneven: [10, 1000, 0.5]}}, b: {}}"],
        "the tasks have different numbers of clients",
    ),
}


@pytest.mark.parametrize(("overrides", "words"), ASSEMBLED.values(), ids=ASSEMBLED.keys())
def test_a_part_that_cannot_be_built(capsys, overrides, words):
    refused(capsys, ["run", QUICKSTART, *overrides], words)


TASKS = {
    **{
        f"{{{name}: {{}}, b: {{}}}}": f"the task name '{name}'"
        for name in ("forward", "keys", "training", "T_destination")
    },
    "{'': {}}": "the task name ''",
    "{a b: {}}": "the task name 'a b'",
    "{a.b: {}}": "the task name 'a.b'",
    "{a: 3}": "tasks.a=3",
    "{a: {}, a: {}}": "the key 'a' stands twice",
    "{a: {roundz: 3}}": "unknown config key 'roundz'",
    **{
        f"{{a: {{{key}: 3}}}}": f"tasks.a.{key} is not for one task alone"
        for key in (
            "rounds",
            "output",
            "clients",
            "network",
            "alignment",
            "name",
            "tracking",
            "evaluate_every",
            "tasks",
        )
    },
    "{a: {local: {lr: .inf}}}": FINITE,
    "{a: {seed: true}}": FLAG,
}


@pytest.mark.parametrize(("tasks", "words"), TASKS.items(), ids=TASKS.keys())
def test_wrong_tasks(capsys, tasks, words):
    refused(capsys, ["run", QUICKSTART, *MMFL, f"tasks={tasks}"], words)


def test_alignment_of_tasks(capsys):
    refused(
        capsys, ["run", QUICKSTART, *MMFL, "tasks={a: {}}", "alignment=true"], "alignment=true does nothing for tasks"
    )


PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
FILES = {
    "empty": (b"", "the config lacks 'name'"),
    "binary": (PNG, "is not a text in UTF-8 (byte 0); save it as UTF-8"),
    "UTF-16": ("name: x".encode("utf-16"), "is not a text in UTF-8"),
    "Latin-1": ("name: gr\xfcn".encode("latin-1"), "is not a text in UTF-8 (byte 8)"),
    "NUL": (b"name: \0", "is not valid YAML"),
    "a list": (b"- a", "holds list"),
    "a word": (b"name", "holds str"),
    "deep": (b"[" * 1500, "nested too deeply"),
    "deep and whole": (b"a: " + b"[" * 1500 + b"]" * 1500, "nested too deeply"),
    "open": (b"a: [", "is not valid YAML"),
    "tabs": (b"a:\n\tb: 3", "is not valid YAML"),
    "a key twice": (b"rounds: 3\nname: x\nrounds: 4\n", "the key 'rounds' stands twice, again in line 3"),
    "a nested key twice": (b"local: {lr: 1, lr: 2}", "the key 'lr' stands twice, again in line 1"),
    "a ratio twice": (b"keep_ratio: {1: 0.5, 1.0: 0.5}", "the key 1.0 stands twice"),
    "python": (b"name: !!python/object/apply:os.getcwd []", "is not valid YAML"),
    "a list as key": (b"{[1]: 2}", "is not valid YAML"),
    "two documents": (b"a: 1\n---\nb: 2", "is not valid YAML"),
    "a date": (b"name: 2020-13-45", "is not valid YAML"),
}


@pytest.mark.parametrize(("content", "words"), FILES.values(), ids=FILES.keys())
def test_a_wrong_config_file(capsys, content, words):
    Path("config.yaml").write_bytes(content)
    refused(capsys, ["run", "config.yaml"], words)


def test_a_config_that_is_no_file(capsys):
    refused(capsys, ["run", "."], "cannot read the config '.': Is a directory")
    refused(capsys, ["run", "x" * 300], "File name too long")
    refused(capsys, ["run", "nowhere.yaml"], "cannot read the config 'nowhere.yaml': No such file")
    refused(capsys, ["run", "a\0b"], "cannot read the config")


def test_a_config_may_have_a_byte_order_mark():
    Path("config.yaml").write_bytes(b"\xef\xbb\xbf" + Path(QUICKSTART).read_bytes())
    assert main(["inspect", "config.yaml"]) == 0


COMMANDS = {
    "nothing": ([], "required: COMMAND"),
    "unknown": (["rnu", QUICKSTART], "invalid choice: 'rnu'"),
    "no config": (["run"], "the following arguments are required: CONFIG;"),
    "no strategies": (["compare", QUICKSTART], "--strategies"),
    "empty strategies": (["compare", QUICKSTART, "--strategies", ","], "names no strategy"),
    "unknown strategy": (["compare", QUICKSTART, "--strategies", "prsm"], "did you mean 'prism'?"),
    "seeds": (["compare", QUICKSTART, "--strategies", "top_n", "--seeds", "a,b"], "--seeds: 'a' is no whole number"),
    "no seeds": (["compare", QUICKSTART, "--strategies", "top_n", "--seeds", ""], "--seeds: '' is no whole number"),
    "half a seed": (["compare", QUICKSTART, "--strategies", "top_n", "--seeds", "1,"], "'' is no whole number"),
    "jobs": (["compare", QUICKSTART, "--strategies", "top_n", "--jobs", "x"], "--jobs: 'x' is no whole number"),
    "no jobs": (["compare", QUICKSTART, "--strategies", "top_n", "--jobs", "0"], "--jobs: 0 is less than 1"),
    "option": (["run", QUICKSTART, "--resme"], "unknown option '--resme'"),
    "a long option": (["run", QUICKSTART, "--" + "x" * 5000], "unknown option"),
    "no value": (["run", QUICKSTART, "rounds"], "write dotted.key=value"),
    "inspect": (["inspect", QUICKSTART, "rounds=0"], "rounds=0"),
    "table": (["table", "9"], "unknown table '9'"),
    "scale": (["table", "1", "--scale", "huge"], "unknown scale 'huge'"),
    "only": (["table", "1", "--only", "nothing_such"], "--only nothing_such matches none"),
    "output": (["table", "1", "--output", QUICKSTART], "is a file, and a folder is needed"),
    "no output": (["table", "1", "--output", ""], "a path is needed"),
    "long output": (["table", "1", "--output", "x" * 300], "a shorter path is needed"),
}


@pytest.mark.parametrize(("arguments", "words"), COMMANDS.values(), ids=COMMANDS.keys())
def test_a_wrong_command(capsys, arguments, words):
    refused(capsys, arguments, words)


def encoded(size=(32, 32), kind="PNG", mode="RGB"):
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind)
    return file.getvalue()


def table(images, labels, label_type=None):
    column = pa.array(
        [{"bytes": image, "path": None} for image in images], pa.struct({"bytes": pa.binary(), "path": pa.string()})
    )
    return pa.table({"img": column, "label": pa.array(labels, label_type)})


def parquet_bytes(content):
    file = io.BytesIO()
    parquet.write_table(content, file)
    return file.getvalue()


def holed(data: bytes) -> bytes:
    middle = len(data) // 3
    return data[:middle] + b"\0" * middle + data[2 * middle :]


SOUND = parquet_bytes(table([encoded()] * 50, [0] * 50))
MANY = parquet_bytes(table([encoded() + bytes([i]) for i in range(50)], list(range(10)) * 5))
META = table([encoded()], [0]).replace_schema_metadata({"huggingface": "{oops"})
PARQUETS = {
    "garbage": (b"garbage", "train-0.parquet"),
    "empty": (b"", "train-0.parquet"),
    "cut off": (SOUND[:-20], "train-0.parquet"),
    "head alone": (SOUND[:100], "train-0.parquet"),
    "a hole": (holed(MANY), "train-0.parquet"),
    "no rows": (parquet_bytes(table([], [], pa.int64())), "holds no images"),
    "negative": (parquet_bytes(table([encoded()], [-1])), "labels from -1"),
    "too large": (parquet_bytes(table([encoded()], [10])), "labels up to 10"),
    "no label": (parquet_bytes(table([encoded()], [None], pa.int64())), "whose `label` None is no whole number"),
    "words": (parquet_bytes(table([encoded()], ["cat"])), "whose `label` 'cat' is no whole number"),
    "fractions": (parquet_bytes(table([encoded()], [0.5])), "whose `label` 0.5 is no whole number"),
    "no image": (parquet_bytes(table([None], [0])), "a row without an image"),
    "image garbage": (parquet_bytes(table([b"garbage"], [0])), "cannot read"),
    "image cut off": (parquet_bytes(table([encoded()[:60]], [0])), "cannot read"),
    "formats": (parquet_bytes(table([encoded(kind="JPEG"), encoded()], [0, 1])), "cannot read"),
    "sizes": (parquet_bytes(table([encoded(), encoded((30, 32))], [0, 1])), "images differ in size"),
    "raw bytes": (parquet_bytes(pa.table({"img": [encoded()], "label": [0]})), "expected structs of `bytes`"),
    "other columns": (parquet_bytes(pa.table({"a": [1]})), "has the columns a; expected"),
    "metadata": (parquet_bytes(META), "cannot read"),
}


@pytest.mark.parametrize(("content", "words"), PARQUETS.values(), ids=PARQUETS.keys())
def test_damaged_parquet(capsys, content, words):
    folder = Path("data/cifar10")
    folder.mkdir(parents=True)
    (folder / "train-0.parquet").write_bytes(content)
    (folder / "test-0.parquet").write_bytes(SOUND)
    refused(capsys, ["run", CIFAR, "data.root=data"], words)


def h5_bytes(fill):
    file = io.BytesIO()
    with h5py.File(file, "w") as stored:
        fill(stored)
    return file.getvalue()


def client(snippets):
    return lambda stored: stored.create_group("examples/A").create_dataset("snippets", data=snippets)


PLAY = h5_bytes(client(np.array([b"To be, or not to be"] * 50, dtype="S30")))
H5 = {
    "garbage": (b"garbage", "shakespeare_train.h5"),
    "empty": (b"", "shakespeare_train.h5"),
    "cut off": (PLAY[:-100], "shakespeare_train.h5"),
    "head alone": (PLAY[:600], "shakespeare_train.h5"),
    "no examples": (h5_bytes(lambda stored: None), "shakespeare_train.h5"),
    "no clients": (h5_bytes(lambda stored: stored.create_group("examples")), "shakespeare_train.h5"),
    "no snippets": (h5_bytes(lambda stored: stored.create_group("examples/A")), "shakespeare_train.h5"),
    "no words": (h5_bytes(client(np.zeros(0, dtype="S3"))), "shakespeare_train.h5"),
    "numbers": (h5_bytes(client(np.arange(3))), "shakespeare_train.h5"),
}


@pytest.mark.parametrize(("content", "words"), H5.values(), ids=H5.keys())
def test_damaged_h5(capsys, content, words):
    Path("shakespeare_train.h5").write_bytes(content)
    Path("shakespeare_test.h5").write_bytes(PLAY)
    refused(capsys, ["run", SHAKESPEARE, "data.root=."], words)


TREES = {
    "empty": ({}, "cannot read"),
    "no list": ({"train/n1/n1_0.JPEG": b""}, "wnids.txt"),
    "no images": ({"wnids.txt": b"n1\n", "val/val_annotations.txt": b""}, "cannot read"),
    "broken image": ({"wnids.txt": b"n1\n", "train/n1/images/n1_0.JPEG": b"x"}, "cannot read"),
    "binary list": ({"wnids.txt": b"\xff\xfe\0"}, "cannot read"),
    "odd name": ({"wnids.txt": b"n1\n", "train/n1/images/x.JPEG": b"x"}, "cannot read"),
}


@pytest.mark.parametrize(("files", "words"), TREES.values(), ids=TREES.keys())
def test_damaged_tiny_imagenet(capsys, files, words):
    tree = Path("tiny-imagenet-200")
    tree.mkdir()
    for name, content in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(content)
    refused(capsys, ["run", str(CONFIGS / "tiny_imagenet_cct.yaml"), "data.root=."], words)


def test_data_that_is_not_there(capsys):
    refused(capsys, ["run", CIFAR, "data.root=nowhere"], "no cifar10 under")
    refused(capsys, ["run", CIFAR, "data.root=null"], "needs data.root")
    refused(
        capsys, ["run", str(CONFIGS / "tiny_imagenet_cct.yaml"), "data.root=.", "data.download=true"], "cannot fetch"
    )


def test_a_download_that_fails_is_one_line_and_leaves_no_folder(capsys, monkeypatch):
    from train.data import official

    def offline(folder, download):
        folder.mkdir(parents=True)
        print("0.0%", file=sys.stderr)
        raise OSError("no route\nto host")

    monkeypatch.setitem(official.DOWNLOADS, "cifar10", offline)
    refused(
        capsys, ["run", CIFAR, "data.root=a/b", "data.download=true"], "could not download cifar10 into a/b/cifar10: no"
    )


ROWS = "1,2\n" * 19
PROFILES = {
    "missing": (None, "cannot read the client profiles"),
    "empty": (b"", "p.csv has 0 rows"),
    "columns": (b"a,b\n1,2\n", "p.csv must have numbers in the columns compute and communicate"),
    "words": (b"compute,communicate\n1,x\n", "p.csv must have numbers"),
    "few": (b"compute,communicate\n1,2\n", "p.csv has 1 rows, but there are 20 clients"),
    "short row": (b"compute,communicate\n1\n", "p.csv must have numbers"),
    "negative": (f"compute,communicate\n{ROWS}1,-2\n".encode(), "p.csv, line 21: communicate[19] is -2.0"),
    "NaN": (f"compute,communicate\n{ROWS}nan,2\n".encode(), "p.csv, line 21: compute[19] is nan"),
    "infinite": (f"compute,communicate\ninf,1\n{ROWS}".encode(), "p.csv, line 2: compute[0] is inf"),
    "Latin-1": (b"compute,communicate\n\xfc,1\n", "p.csv must have"),
    "NUL": (b"compute,communicate\n1,\0\n", "p.csv must have"),
    "a huge field": (b"compute,communicate\n1," + b"1" * 200_000 + b"\n", "p.csv must have"),
}


@pytest.mark.parametrize(("content", "words"), PROFILES.values(), ids=PROFILES.keys())
def test_wrong_profiles(capsys, content, words):
    if content is not None:
        Path("p.csv").write_bytes(content)
    refused(capsys, ["run", QUICKSTART, "network.bandwidth=1", "network.profiles=p.csv"], words)


def test_what_may_look_odd_and_is_right(capsys):
    Path("p.csv").write_bytes(f"compute,communicate\n1,1\n{ROWS}".encode("utf-8-sig"))
    odd = [
        "clip=.inf",
        "local.optimizer=sgd",
        "name=grün",
        "output=2024",
        "network.bandwidth=1",
        "network.profiles=p.csv",
        "local.batch_size=10000000000",
    ]
    small = ["rounds=1", "clients.per_round=2", "local.epochs=1", "model.width=4", "model.groups=2", "model.blocks=[1]"]
    assert main(["run", QUICKSTART, *odd, *small, "engine=sequential"]) == 0
    assert (Path("2024") / "metrics.jsonl").exists()
    assert main(["run", QUICKSTART, "output=run #1", *small, "engine=sequential", "keep_ratio=1e-11"]) == 0
    assert Path("run #1").is_dir()


def test_the_catalog_is_long_enough():
    groups = (OVERRIDES, ASSEMBLED, TASKS, FILES, COMMANDS, PARQUETS, H5, TREES, PROFILES)
    assert sum(map(len, groups)) >= 150
