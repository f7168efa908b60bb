"""The same seed gives the same bits: wherever, in whatever processes, in one go or not."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.train.engines.jobs import make_job, make_plan, with_bad_clients
from tests.train.test_cli import REPOSITORY
from tests.train.test_runs import TINY, ignore, tiny
from train.engines.choices import Choices, pays_together
from train.engines.trial import choose_ways
from train.provenance import PROVENANCE_FILE
from train.run import run

ARGUMENTS = ["configs/quickstart.yaml", *TINY[1:], "rounds=3", "checkpoint_every=1"]


def model_of(directory):
    return (directory / "model.safetensors").read_bytes()


def train(home, *arguments, threads="1"):
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "OMP_NUM_THREADS": threads}
    command = [sys.executable, "-m", "train", *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_neither_home_nor_threads_nor_command_nor_a_break_shows(tmp_path):
    train(tmp_path / "one", "run", *ARGUMENTS, f"output={tmp_path / 'run'}")
    train(tmp_path / "two", "run", *ARGUMENTS, "engine=stacked", f"output={tmp_path / 'stacked'}", threads="2")
    compared = ["--strategies", "collective,dense", "--jobs", "2", f"output={tmp_path / 'compare'}"]
    train(tmp_path / "three", "compare", *ARGUMENTS, *compared, threads="2")

    def pull_the_plug(metrics):
        if metrics["round"] == 1:
            raise KeyboardInterrupt

    config = tiny(tmp_path / "broken", "rounds=3", "checkpoint_every=1")
    with pytest.raises(KeyboardInterrupt):
        run(config, pull_the_plug)
    train(tmp_path / "four", "run", *ARGUMENTS, f"output={config.directory}", "--resume")
    whole = model_of(tmp_path / "run")
    assert whole == model_of(config.directory) == model_of(tmp_path / "stacked")
    assert whole == model_of(tmp_path / "compare" / "collective-0")
    for home in ("one", "two", "three", "four"):
        assert not list((tmp_path / home).rglob("*spectral*"))


def test_a_run_tells_what_it_was_made_with(tmp_path):
    run(tiny(tmp_path / "run"), ignore)
    made = json.loads((tmp_path / "run" / PROVENANCE_FILE).read_text())
    assert (made["engine"], made["threads"], made["device"]) == ("auto", 1, "cpu")
    assert set(made["choices"]["quickstart"]["together"]) == {"0.2", "0.4"}
    assert made["choices"]["quickstart"]["convolutions"]
    (start,) = made["starts"]
    assert (start["round"], start["torch"]) == (0, torch.__version__.partition("+")[0])
    assert start.keys() >= {"python", "numpy", "safetensors", "commit", "processor"}


def test_a_resumed_run_keeps_its_choices_and_tells_of_another_torch(tmp_path, caplog):
    config = tiny(tmp_path / "run", "rounds=3", "checkpoint_every=1", "engine=stacked")

    def pull_the_plug(metrics):
        if metrics["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, pull_the_plug)
    path = config.directory / PROVENANCE_FILE
    made = json.loads(path.read_text())
    made["choices"]["quickstart"] |= {"together": {"0.2": False, "0.4": True}, "convolutions": {"first": "looped"}}
    made["starts"][0]["torch"] = "1.0"
    path.write_text(json.dumps(made))
    run(config, ignore, resume=True)
    again = json.loads(path.read_text())
    assert again["choices"]["quickstart"]["together"] == {"0.2": False, "0.4": True}
    assert again["choices"]["quickstart"]["convolutions"]["first"] == "looped"
    assert [start["round"] for start in again["starts"]] == [0, 2]
    assert "this run was started with torch 1.0; with " in caplog.text


def test_whether_clients_are_folded_follows_from_the_model_not_from_a_client():
    sound, bad = make_job("resnet"), with_bad_clients(make_job("resnet"))
    for job in (sound, bad):
        choose_ways(job, make_plan(job).values())
    assert sound.choices == bad.choices
    assert sound.choices.together == {"0.3": True, "0.6": True}


def test_the_trial_leaves_the_model_as_it_was_and_has_an_opinion_of_whole_models():
    job = make_job("cct")
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    choose_ways(job, make_plan(job, "dense").values())
    assert job.choices.together == {"whole": True}
    assert all(torch.equal(tensor, before[name]) for name, tensor in job.model.state_dict().items())


def test_what_keeps_a_core_busy_is_trained_alone():
    assert pays_together(10**6, 10, "cpu")
    assert not pays_together(10**8, 10, "cpu")
    assert pays_together(10**8, 10, "cuda")


def test_ways_can_be_timed_and_are_then_written_down(tmp_path):
    run(tiny(tmp_path / "run", "rounds=1", "ways=timed"), ignore)
    made = json.loads((tmp_path / "run" / PROVENANCE_FILE).read_text())["choices"]["quickstart"]
    assert set(made["together"]) == {"0.2", "0.4"}
    assert set(made["convolutions"].values()) <= {"grouped", "looped", "unfolded"}
    job = replace(make_job(model=nn.Sequential(nn.Flatten(), nn.Linear(64, 5))), choices=Choices(timed=True))
    choose_ways(job, make_plan(job, "dense").values())
    assert set(job.choices.together) == {"whole"}


def test_a_spoiled_record_is_told(tmp_path):
    config = tiny(tmp_path / "run")
    run(config, ignore)
    path = config.directory / PROVENANCE_FILE
    path.write_text("[1")
    (config.directory / "metrics.jsonl").write_text("")
    shutil.copy(path, tmp_path / "kept")
    with pytest.raises(ValueError, match=r"cannot read .*provenance\.json"):
        run(config, ignore, resume=True)
    assert path.read_text() == "[1"
