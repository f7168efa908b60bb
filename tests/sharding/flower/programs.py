"""Flower's programs, started for a test and ended with it."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.train.runs import PATIENCE, wait_until

ROOT = Path(__file__).parents[3]
LOOPBACK = "127.0.0.1"
WARM = ("python", "-m", "sharding.flower.warm")  # starts in place of `flower-supernode`


def free_port():
    with socket.socket() as one:
        one.bind((LOOPBACK, 0))
        return one.getsockname()[1]


def listens(port):
    with socket.socket() as one:
        return one.connect_ex((LOOPBACK, port)) == 0


def environment_of(home):
    """Return the environment of a program with a home of its own, and with this checkout's modules."""
    return os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        **dict.fromkeys(("NO_PROXY", "no_proxy", "no_grpc_proxy"), LOOPBACK),
    }


def end(process):
    """End a process, and then what it has left."""
    process.terminate()
    process.wait(PATIENCE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Programs(ExitStack):
    """A SuperLink on loopback, and what talks to it.

    Attributes:
        folder: of their homes and logs.
        port: of the SuperLink.
    """

    def __init__(self, folder):
        super().__init__()
        self.folder, self.port = folder, free_port()
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").write_text(f'[superlink.mine]\naddress = "{LOOPBACK}:{self.port}"\ninsecure = true\n')

    def start(self, name, *words, **environment):
        """Start a program in the background; its output is in ``name.log``."""
        output = self.enter_context((self.folder / f"{name}.log").open("a"))
        environment = environment_of(self.folder) | environment
        command = [Path(sys.executable).parent / words[0], *map(str, words[1:])]
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, cwd=self.folder, start_new_session=True
        )
        self.callback(end, process)
        return process

    def superlink(self, *options):
        """Start the SuperLink, and wait until it listens."""
        words = ["--host", LOOPBACK, "--port", self.port, "--disable-runtime-dependency-installation"]
        process = self.start("superlink", "flower-superlink", *(options or ["--insecure"]), *words)
        wait_until(lambda: listens(self.port))
        return process

    def node(self, number, settings="", port=None, program=WARM, **environment):
        """Start a node, which calls the SuperLink's or another port."""
        words = [*program, "--insecure", "--superlink", f"{LOOPBACK}:{port or self.port}", "--port", free_port()]
        home = {"FLWR_HOME": str(self.folder / f"home-{number}")}
        settings = f"partition-id={number} {settings}"
        return self.start(f"node-{number}", *words, "--node-config", settings, **home, **environment)

    def submit(self, app, settings):
        """Submit an app with a run configuration, and follow its log."""
        return self.start("run", "flwr", "run", app, "mine", "--stream", "--run-config", settings)

    def log(self, name):
        """Return what a program has printed."""
        return (self.folder / f"{name}.log").read_text()
