"""What `federate` starts on this machine, without starting it."""

from pathlib import Path

from train.config import load_config
from train.federate import launch
from train.federate.app import read
from train.federate.nodes import Patience

QUICKSTART = "configs/quickstart.yaml"


def read_for(nodes, *overrides):
    return read(launch.settings_of(QUICKSTART, overrides, nodes, Patience(60.0, 60.0)))


def test_directories_tell_federations_apart_and_from_a_run():
    directories = [read_for(2).directory, read_for(4).directory, read_for(2, "local.lr=0.05").directory]
    directories.append(load_config(QUICKSTART).directory.resolve())
    assert len({*directories}) == 4
    assert {directory.parent for directory in directories} == {Path("runs").resolve()}


def test_an_output_of_ones_own_is_kept():
    assert read_for(2, "output=/tmp/own").directory == Path("/tmp/own")
