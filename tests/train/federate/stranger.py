"""Somebody who reaches the SuperLink and has its public certificate, and a home of his own."""

import os
import subprocess
import sys
from pathlib import Path

from tests.train.runs import PATIENCE
from train.federate.keys import write_node_key

ROOT = Path(__file__).parents[3]


def flwr(home, *words):
    environment = os.environ | {"FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0"}
    command = [str(Path(sys.executable).with_name("flwr")), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE)


def move_in(home, address, certificate):
    """Give the stranger a key and the address of a SuperLink, which he calls `x`."""
    home.mkdir()
    write_node_key(home)
    link = f'[superlink.x]\naddress = "{address}"\nroot-certificates = "{certificate}"\n'
    (home / "config.toml").write_text(link)


def tries_all(home):
    """Return what becomes of what the stranger tries: a node of his own, and a run."""
    words = (("supernode", "register", str(home / "node.pub"), "x"), ("run", str(ROOT), "x"))
    return [flwr(home, *command) for command in words]
