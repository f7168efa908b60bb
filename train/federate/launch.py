"""A whole federation on this machine: a SuperLink and its SuperNodes on loopback, with TLS and a key for each node.

Everything is a process of its own, as it would be on hosts of their own: a node has its key, the certificate to know
the server by, and the file of its own samples. What was started here is ended here, whatever happens.
"""

import json
import logging
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from time import monotonic, sleep

from sharding.errors import UserError, few
from train.config.idle_keys import refuse_idle
from train.config.naming import with_directory
from train.config.schema import Config, load_config, read_config
from train.experiment import assign_keep_ratios, read_dataset, share_out
from train.federate.client_app import write_data
from train.federate.keys import LOOPBACK, write_certificates, write_node_key
from train.federate.roster import Patience
from train.federate.server_app import ENGINE, ROOT, check_federated
from train.federate.status import FINISHED, FOLDER, Status
from train.federate.supervisor import Processes
from train.metrics import Metrics
from train.rundir.directory import RunDirectory, is_finished
from train.rundir.files import METRICS_FILE
from train.runtime.errors import REMEDY, RunError
from train.runtime.jsonl import NewLines
from train.runtime.stages import enter

log = logging.getLogger(__name__)

STARTING = 60.0  # seconds for a process to listen


@dataclass(frozen=True)
class Place:
    """Where a federation is on this machine.

    Attributes:
        folder: of its files.
        port: that the SuperLink listens at.
    """

    folder: Path
    port: int

    @property
    def address(self) -> str:
        """The SuperLink's."""
        return f"{LOOPBACK}:{self.port}"

    def environment(self, name: str) -> dict[str, str]:
        """Return what a process finds in its environment: a home of its own, and nothing sent to anybody.

        It finds the modules that this one does, which `plugins` may name: those of the folder it was started in too.
        """
        home, modules = self.folder / "homes" / name, [os.environ.get("PYTHONPATH"), os.getcwd()]
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # they start one another
        return {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": programs,
            "PYTHONPATH": os.pathsep.join(filter(None, modules)),
        }


def federate(
    config: Config, settings: dict[str, object], progress: Callable[[Metrics], None], resume: bool = False
) -> None:
    """Train as configured, with each client a node of its own on this machine.

    Args:
        config: as `read` has it of the settings.
        settings: of the run, by `settings_of`.
        progress: is handed each round's metrics.
        resume: go on with the run that the directory holds.

    Raises:
        UserError: as `train.run.run`.
        RunError: the run did not come to its end.
    """
    check_federated(config)
    RunDirectory(config, resume).check()
    if resume and is_finished(config):
        return
    enter("writes keys and each node's data")
    place = lay_out(config, settings)
    with Processes(place.folder / "logs") as processes:
        start_server(processes, place)
        enter(f"starts {config.clients.count} nodes")
        for node in range(config.clients.count):
            start_node(processes, place, node, node_settings(config, place, node))
        submit(processes, place)
        follow(processes, config, progress)


def settings_of(path: str, overrides: Sequence[str], nodes: int, patience: Patience) -> dict[str, object]:
    """Return the run's configuration for Flower, flat as it wants it; how many clients there are follows from `nodes`.

    Without an `output` the directory is named after all that differs from the configuration, the nodes too.
    """
    told = read_config(path, overrides)
    refuse_idle([told])
    asked = told.config
    own = [f"clients.count={nodes}", f"clients.per_round={min(asked.clients.per_round, nodes)}"]
    words = [*overrides, *own]
    config = with_directory(load_config(path, words), words)
    tell_replaced(config, overrides)
    return {
        "config": str(Path(path).resolve()),
        "overrides": shlex.join([*words, f"output={json.dumps(str(config.directory.resolve()))}"]),
        "start-timeout": patience.start,
        "round-timeout": patience.round,
    }


def tell_replaced(config: Config, overrides: Sequence[str]) -> None:
    """Warn of each override that a federation has otherwise."""
    clients = config.clients
    used = {"clients.count": clients.count, "clients.per_round": clients.per_round, "engine": ENGINE}
    for key, _, asked in (override.partition("=") for override in overrides):
        if key in used and asked != str(used[key]):
            log.warning("%s=%s does not count: with %d nodes it is %s", key, asked, clients.count, used[key])


def lay_out(config: Config, settings: dict[str, object]) -> Place:
    """Write the keys, the configurations, and each node's data; those of an earlier start go."""
    place = Place(config.directory / FOLDER, free_port())
    if place.folder.exists() and any(place.folder.iterdir()) and not (place.folder / "logs").is_dir():
        raise UserError(f"{place.folder} is not from here and would be removed; move it, or choose another output=…")
    dataset = read_dataset(config)
    shares = share_out(config, dataset)
    if len(shares) != config.clients.count:
        raise UserError(
            f"data.uneven={config.data.uneven} leaves {len(shares)} of {config.clients.count} clients; a federation "
            "needs data for each node"
        )
    rmtree(place.folder, ignore_errors=True)
    place.folder.mkdir(parents=True, mode=0o700)
    (place.folder / "logs").mkdir()
    write_certificates(place.folder)
    for node, data in shares.items():
        folder = place.folder / f"node-{node}"
        folder.mkdir()
        write_node_key(folder)
        write_data(folder / "data.safetensors", data)
    operator = Path(place.environment("operator")["FLWR_HOME"])
    operator.mkdir(parents=True)
    link = {"address": place.address, "root-certificates": str(place.folder / "ca.crt")}
    (operator / "config.toml").write_text(
        _toml({"default": "loopback"}, "superlink") + _toml(link, "superlink.loopback")
    )
    (place.folder / "run.toml").write_text(_toml(settings))
    return place


def start_server(processes: Processes, place: Place) -> None:
    """Start the SuperLink, wait until it listens, and tell it the nodes' public keys."""
    folder = place.folder
    command = [_program("flower-superlink"), "--host", LOOPBACK, "--port", str(place.port), "--enable-supernode-auth"]
    command += ["--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt")]
    command += ["--ssl-keyfile", str(folder / "server.key"), "--disable-runtime-dependency-installation"]
    enter("starts the SuperLink")
    processes.start("superlink", command, place.environment("server"))
    end = monotonic() + STARTING
    while not _listens(place.port):
        if processes.ended() or monotonic() > end:
            raise UserError(
                f"the SuperLink does not listen at {place.address}: {last_words(folder / 'logs/superlink.log')}"
            )
        sleep(0.1)
    register(place, sorted(folder.glob("node-*/node.pub")))


def register(place: Place, keys: Sequence[Path]) -> None:
    """Let the nodes with these public keys in.

    Raises:
        UserError: the SuperLink does not take one.
    """
    environment = os.environ | place.environment("operator")
    for number, key in enumerate(keys, 1):
        enter(f"registers node {number} of {len(keys)}")
        command = [_program("flwr"), "supernode", "register", str(key), "loopback"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            why = " ".join((done.stdout + done.stderr).split())[-300:]
            raise UserError(f"the SuperLink does not take the key {key}: {why}")


def node_settings(config: Config, place: Place, node: int) -> dict[str, object]:
    """Return what a node's operator says of it."""
    ratio = assign_keep_ratios(config.keep_ratio, config.clients.count, config.seed_of_data)[node]
    data = place.folder / f"node-{node}" / "data.safetensors"
    return {"partition-id": node, "keep-ratio": float(ratio), "data": str(data)}


def start_node(processes: Processes, place: Place, node: int, settings: dict[str, object]) -> None:
    """Start a SuperNode."""
    folder = place.folder
    command = [_program("flower-supernode"), "--superlink", place.address, "--port", str(free_port())]
    command += ["--root-certificates", str(folder / "ca.crt")]
    command += ["--auth-supernode-private-key", str(folder / f"node-{node}" / "node.key")]
    command += ["--node-config", " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())]
    processes.start(f"node-{node}", command, place.environment(f"node-{node}"))


def submit(processes: Processes, place: Place, app: Path = ROOT) -> None:
    """Have the SuperLink run the app of that folder, and stay as long as it runs."""
    command = [_program("flwr"), "run", str(app), "loopback", "--stream"]
    command += ["--run-config", str(place.folder / "run.toml")]
    processes.start("run", command, place.environment("operator"))


def follow(processes: Processes, config: Config, progress: Callable[[Metrics], None]) -> None:
    """Hand each round's metrics on until the run has ended. A node that ends is reported, and the run continues.

    Raises:
        RunError: the run, the SuperLink or all nodes ended before its time, or the server says why it could not go on.
    """
    logs, status, count = config.directory / FOLDER / "logs", Status(config), config.clients.count
    rounds, gone, joined, lost, done = NewLines(config.directory / METRICS_FILE), set[str](), 0, 0, 0
    for metrics in rounds.read():  # of an earlier start
        progress(metrics)
    while True:
        ended, said = processes.ended(), status.read()  # in this order: of one that has ended, the last word is read
        if len(said["joined"]) > joined:
            joined = len(said["joined"])
            absent = f"; waits for {few(said['waiting_for'])}" if said["waiting_for"] else ", trains"
            enter(f"{joined} of {count} nodes are there{absent}")
        for metrics in rounds.read():
            progress(metrics)
            done, lost = done + 1, lost + (not metrics["heard"])
        if said["ended"] == FINISHED:
            break
        if said["ended"] is not None:
            raise RunError(f"{said['ended']}; see {logs / 'run.log'}")
        for name in sorted(ended.keys() - gone - {"superlink", "run"}):
            log.warning("%s has ended: %s; see %s", name, last_words(logs / f"{name}.log"), logs / f"{name}.log")
        gone |= ended.keys()
        if gone & {"superlink", "run"} or len(gone) == count:
            codes = ", ".join(f"{name} (exit code {ended[name]})" for name in sorted(gone))
            raise RunError(f"{codes} ended before the run did; {logs} says why, and {REMEDY}")
        sleep(0.5)
    if lost:
        log.warning("in %d of %d rounds nobody was heard; metrics.jsonl says why", lost, done)


def last_words(path: Path) -> str:
    """Return the last line that says something."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "nothing was said")[:300]


def free_port() -> int:
    """Return a port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex((LOOPBACK, port)) == 0


def _program(name: str) -> str:
    """Return a program of Flower's, that of this environment."""
    return str(Path(sys.executable).with_name(name))


def _toml(values: dict[str, object] | dict[str, str], table: str = "") -> str:
    """Return values as TOML: a number or string is the same in JSON."""
    return (f"[{table}]\n" if table else "") + "".join(
        f"{key} = {json.dumps(value)}\n" for key, value in values.items()
    )
