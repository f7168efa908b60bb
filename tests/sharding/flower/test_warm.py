"""Apps start from a process that has torch in memory; without Flower's programs, which scripts stand for."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from shutil import rmtree

import pytest

from sharding.flower.warm import installed, make_folder, write_script

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(tmp_path):
    """Run a shell script as the SuperNode, and return what all processes print."""

    def run(supernode):
        for name, script in (("flower-supernode", supernode), ("flwr-clientapp", 'echo "cold $*"')):
            (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
            (tmp_path / name).chmod(0o700)
        environment = {
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(tmp_path),
        }
        command = [sys.executable, "-m", "sharding.flower.warm", "--option", "a b"]
        done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    return run


def test_warm_supernode_starts_flowers_own_program_in_a_fork_and_without_its_helper_as_flower_does(run, tmp_path):
    lose_the_helper = 'rm "$(dirname "$(command -v flwr-clientapp)")/socket"'
    code, told = run(f'echo "node $2"\nflwr-clientapp --help\n{lose_the_helper}\nflwr-clientapp --token "a b"\nexit 3')
    assert code == 3
    assert "node a b" in told
    assert told.count("usage: flwr-clientapp") == 1  # Flower's program; one of its own would print "cold"
    assert told.count("cold") == 1
    assert "cold --token a b" in told
    assert "Warning" not in told
    assert not list(tmp_path.glob("supernode-*"))  # the process that forks has ended after the SuperNode


def test_script_runs_although_the_paths_have_spaces(tmp_path):
    python = tmp_path / "my project" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    write_script(python.parent, str(python), "/bin/echo")  # no process listens
    script = python.with_name("flwr-clientapp")
    told = subprocess.run([script, "--token", "a  b"], capture_output=True, text=True, check=True).stdout
    assert told == "--token a  b\n"


def test_socket_fits_its_folder_where_temporary_paths_are_long(tmp_path, monkeypatch):
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folder = make_folder()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
    rmtree(folder)
    assert list(long.iterdir()) == []


def test_installed_modules_are_those_that_a_fork_has_imported():
    import numpy.random

    known = sys.modules.keys() - {"numpy.random", "json", "sharding.errors", "tests"}
    assert installed(known) == [numpy.random.__name__]
