"""A whole federation on this machine: a SuperLink and its SuperNodes on loopback, with TLS and a key for each node.

Each is a separate process, as on separate hosts: a node has its key, the certificate by which it knows the server, and
the file of its own samples. All processes end with this one.
"""

import json
import logging
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from time import monotonic, sleep
from typing import Any

from sharding.errors import UserError, join_first
from sharding.rounds.failures import one_line
from train.config.naming import with_directory
from train.config.overrides import check_once, settings
from train.config.schema import Config, check_config, load_config, merge, parse_overrides
from train.experiment.assembly import assign_keep_ratios, partition_dataset, read_dataset
from train.federate.client_app import write_data
from train.federate.keys import write_certificates, write_node_key
from train.federate.roster import Timeouts
from train.federate.server_app import CHECKPOINT_EVERY, ENGINE, ROOT, check_federated, federated
from train.federate.status import FINISHED, FOLDER, LOCK_FILE, Status
from train.federate.supervisor import Processes
from train.rundir.directory import check_directory, is_finished, lock, remove_empty
from train.rundir.file_names import METRICS_FILE
from train.utils.errors import REMEDY, RunError
from train.utils.jsonl import read_lines
from train.utils.stages import set_stage

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
NO_PROXY = ("no_proxy", "NO_PROXY", "no_grpc_proxy")  # gRPC reads the last before the first
STARTING = 120.0  # seconds for a process to listen
SERVERS = {"superlink", "run"}
LINK = "loopback"  # what the operator calls the SuperLink
SUPERNODE = (sys.executable, "-m", "sharding.flower.warm")  # Flower's, with apps that start at once


@dataclass(frozen=True)
class Deployment:
    """The place of a federation on this machine.

    Attributes:
        folder: of its files.
        port: of the SuperLink.
    """

    folder: Path
    port: int

    @property
    def address(self) -> str:
        """Address of the SuperLink."""
        return f"{LOOPBACK}:{self.port}"

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a process: its own home, no telemetry, and this process's modules and programs.

        The modules include those of the working folder, which `plugins` may name. Loopback is no matter for a proxy.
        """
        modules = [os.environ.get("PYTHONPATH"), os.getcwd()]
        return {
            "FLWR_HOME": str(self.folder / "homes" / name),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": os.pathsep.join(filter(None, modules)),
            **{name: ",".join(filter(None, [os.environ.get(name), LOOPBACK, "localhost"])) for name in NO_PROXY},
        }


def federate(
    config: Config, settings: dict[str, object], progress: Callable[[dict[str, Any]], None], resume: bool = False
) -> None:
    """Train as configured, with a separate node on this machine for each client.

    Args:
        config: of the run, from `configure`.
        settings: likewise.
        progress: takes each round's metrics.
        resume: resume the run that the directory holds.

    Raises:
        UserError: as `train.run.run`.
        RunError: the run did not finish.
    """
    check_federated(config)
    check_directory(config, resume)
    if resume and is_finished(config):
        return
    lock_file = config.directory / LOCK_FILE
    created = [path for path in (lock_file, *lock_file.parents) if not path.exists()]  # the innermost first
    config.directory.mkdir(parents=True, exist_ok=True)
    with lock(lock_file):
        set_stage("writing keys and each node's data")
        try:
            deployment = lay_out(config, settings)
        except BaseException:
            remove_empty(created)
            raise
        launch(config, deployment, progress)


def launch(config: Config, deployment: Deployment, progress: Callable[[dict[str, Any]], None]) -> None:
    """Start the processes of a federation, submit the run, and follow it to its end."""
    with Processes(deployment.folder / "logs") as processes:
        start_server(processes, deployment)
        set_stage(f"starting {config.clients.count} nodes")
        for node in range(config.clients.count):
            start_node(processes, deployment, node, node_settings(config, deployment, node))
        submit(processes, deployment)
        follow(processes, deployment, config, progress)


def configure(path: str, overrides: Sequence[str], nodes: int, timeouts: Timeouts) -> tuple[Config, dict[str, object]]:
    """Return the configuration of a run with as many clients as there are nodes, and Flower's flat one, for its server.

    A file's `clients.per_round` is lowered to that number; an override of it is not. Without an `output` the directory
    is named after every override, the number of nodes included.

    Raises:
        UserError: a mistake in the file or an override, or a key that has no effect.
    """
    check_once([*settings(overrides), ("clients.count", "--nodes")])
    given, words = dict(parse_overrides(overrides)), [*overrides, f"clients.count={nodes}"]
    if "clients.per_round" in given:
        config = load_config(path, words)
    else:
        config = load_config(path, overrides)
        clients = {"count": nodes, "per_round": min(config.clients.per_round, nodes)}
        config = check_config(merge(config.model_dump(mode="json"), {"clients": clients}))
        words.append(f"clients.per_round={config.clients.per_round}")
    for key, fixed in (("checkpoint_every", CHECKPOINT_EVERY), ("engine", ENGINE)):
        if key in given and (asked := getattr(config, key)) != fixed:
            raise UserError(f"{key}={asked} does nothing in a federation, where it is {fixed}; remove it")
    output = with_directory(config, words).directory.resolve()
    return federated(config.model_copy(update={"output": output})), {
        "config": str(Path(path).resolve()),
        "overrides": shlex.join([*words, f"output={_quoted(str(output))}"]),
        "start-timeout": timeouts.start,
        "round-timeout": timeouts.round,
    }


def lay_out(config: Config, settings: dict[str, object]) -> Deployment:
    """Write the keys, the configurations, and each node's data, in place of those of an earlier start."""
    deployment = Deployment(config.directory / FOLDER, free_port())
    if deployment.folder.exists() and any(deployment.folder.iterdir()) and not (deployment.folder / "logs").is_dir():
        raise UserError(f"{deployment.folder} was not written by this program; move it, or choose another output=…")
    dataset = read_dataset(config)
    shares = partition_dataset(config, dataset)
    rmtree(deployment.folder, ignore_errors=True)
    deployment.folder.mkdir(parents=True, mode=0o700)
    (deployment.folder / "logs").mkdir()
    write_certificates(deployment.folder, "localhost", LOOPBACK)
    for node, data in shares.items():
        folder = deployment.folder / f"node-{node}"
        folder.mkdir()
        write_node_key(folder)
        write_data(folder / "data.safetensors", data, dataset.num_classes, dataset.pad_token_id)
    operator = Path(deployment.environment("operator")["FLWR_HOME"])
    operator.mkdir(parents=True)
    link = {"address": deployment.address, "root-certificates": str(deployment.folder / "ca.crt")}
    tables = _toml({"default": LINK}, "superlink") + _toml(link, f"superlink.{LINK}")
    (operator / "config.toml").write_text(tables, encoding="utf-8")
    (deployment.folder / "run.toml").write_text(_toml(settings), encoding="utf-8")
    return deployment


def start_server(processes: Processes, deployment: Deployment) -> None:
    """Start the SuperLink, wait until it listens, and register the nodes' public keys."""
    folder = deployment.folder
    command = ["flower-superlink", "--host", LOOPBACK, "--port", str(deployment.port), "--enable-supernode-auth"]
    command += ["--ssl-ca-certfile", str(folder / "ca.crt"), "--ssl-certfile", str(folder / "server.crt")]
    command += ["--ssl-keyfile", str(folder / "server.key"), "--disable-runtime-dependency-installation"]
    set_stage("starting the SuperLink")
    processes.start("superlink", command, deployment.environment("server"))
    end = monotonic() + STARTING
    while not listens(deployment.port):
        if processes.ended() or monotonic() > end:
            reason = last_words(folder / "logs/superlink.log")
            raise UserError(f"the SuperLink does not listen at {deployment.address}: {reason}")
        sleep(0.1)
    register(deployment, sorted(folder.glob("node-*/node.pub")))


def register(deployment: Deployment, keys: Sequence[Path]) -> None:
    """Register nodes by their public keys.

    Raises:
        UserError: the SuperLink refuses one.
    """
    for number, key in enumerate(keys, 1):
        set_stage(f"registering node {number} of {len(keys)}")
        done = flwr(deployment, "supernode", "register", str(key), LINK)
        if done.returncode:
            reason = " ".join((done.stdout + done.stderr).split())[-300:]
            raise UserError(f"the SuperLink refuses the key {key}: {reason}")


def flwr(deployment: Deployment, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of Flower as the operator."""
    environment = os.environ | deployment.environment("operator")
    return subprocess.run(["flwr", *words], env=environment, capture_output=True, text=True, check=False)


def node_settings(config: Config, deployment: Deployment, node: int) -> dict[str, object]:
    """Return the configuration of a node."""
    ratio = assign_keep_ratios(config.keep_ratio, config.clients.count, config.seed_of_data)[node]
    data = deployment.folder / f"node-{node}" / "data.safetensors"
    return {"partition-id": node, "keep-ratio": float(ratio), "data": str(data)}


def start_node(
    processes: Processes,
    deployment: Deployment,
    node: int,
    settings: Mapping[str, object],
    program: Sequence[str] = SUPERNODE,
) -> None:
    """Start a SuperNode."""
    folder = deployment.folder
    command = [*program, "--superlink", deployment.address, "--port", str(free_port())]
    command += ["--root-certificates", str(folder / "ca.crt")]
    command += ["--auth-supernode-private-key", str(folder / f"node-{node}" / "node.key")]
    command += ["--node-config", " ".join(f"{key}={_quoted(value)}" for key, value in settings.items())]
    processes.start(f"node-{node}", command, deployment.environment(f"node-{node}"))


def submit(processes: Processes, deployment: Deployment, app: Path = ROOT) -> None:
    """Submit the app in a folder to the SuperLink, which runs it."""
    command = ["flwr", "run", str(app), LINK, "--stream", "--run-config", str(deployment.folder / "run.toml")]
    processes.start("run", command, deployment.environment("operator"))


def follow(
    processes: Processes, deployment: Deployment, config: Config, progress: Callable[[dict[str, Any]], None]
) -> None:
    """Report each round, and each node that ends, until the run has finished.

    Raises:
        RunError: the server reports why it cannot continue; or the run, the SuperLink or all nodes ended early.
    """
    logs, status = deployment.folder / "logs", Status(config)
    joined, reported, gone = 0, 0, set[str]()
    while True:
        ended, report = processes.ended(), status.read()  # in this order: what has ended has reported
        if len(report["joined"]) > joined:
            joined = len(report["joined"])
            waiting = f"waiting for {join_first(report['waiting_for'])}" if report["waiting_for"] else "training"
            set_stage(f"{joined} of {config.clients.count} nodes connected, {waiting}")
        for metrics in read_lines(config.directory / METRICS_FILE)[reported:]:
            progress(metrics)
            reported += 1
        if report["ended"] == FINISHED:
            return
        check_alive(report, ended, config, logs)
        if "run" in ended:
            follow_log(processes, deployment, status, ended.pop("run"))
        for name in sorted(ended.keys() - gone):
            log.warning("%s has ended: %s; see %s", name, last_words(path := logs / f"{name}.log"), path)
        gone.update(ended)
        sleep(0.5)


def check_alive(report: Mapping[str, Any], ended: Mapping[str, int], config: Config, logs: Path) -> None:
    """Raise `RunError` if the server reports an end, or if its SuperLink or all nodes have ended."""
    if report["ended"] is not None:
        raise RunError(f"{report['ended']}; see {logs / 'run.log'}")
    if "superlink" in ended or len(ended.keys() - SERVERS) == config.clients.count:
        codes = ", ".join(f"{name} (exit code {code})" for name, code in sorted(ended.items()))
        raise RunError(f"{codes} ended before the run did; {logs} says why, and {REMEDY}")


def follow_log(processes: Processes, deployment: Deployment, status: Status, code: int) -> None:
    """Stream the run's log again if the run goes on: Flower's stream can end before it, with any exit code.

    Raises:
        RunError: the run has ended without a report, or was not accepted.
    """
    logs = deployment.folder / "logs"
    done = flwr(deployment, "list", LINK, "--format", "json")
    runs = [] if done.returncode else json.loads(done.stdout)["runs"]  # the latest first
    if not runs:
        raise RunError(f"run (exit code {code}) ended before the run did; {logs} says why, and {REMEDY}")
    number, state, details = (runs[-1][key] for key in ("run-id", "status", "status-details"))
    if state.startswith("finished"):
        if status.read()["ended"] is not None:  # reported since the last look
            return
        raise RunError(
            f"the server's app ended without a report; Flower says {state} ({one_line(details)}), {logs / 'run.log'} "
            f"says more, and {REMEDY}"
        )
    (logs / "run.log").unlink()  # Flower sends the log from its beginning
    processes.start("run", ["flwr", "log", number, LINK, "--stream"], deployment.environment("operator"))


def last_words(path: Path) -> str:
    """Return the last line of a log that is not blank, printable."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    return next((one_line(line) for line in reversed(text.splitlines()) if line.strip()), "its log is empty")[:300]


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def listens(port: int) -> bool:
    """Return whether a process of this machine listens at a port."""
    with socket.socket() as caller:
        return caller.connect_ex((LOOPBACK, port)) == 0


def _quoted(value: object) -> str:
    """Return a number or a string as it is in TOML and YAML."""
    return json.dumps(value, ensure_ascii=False)


def _toml(values: Mapping[str, object], table: str = "") -> str:
    """Return values as TOML."""
    rows = [f"{key} = {_quoted(value)}\n" for key, value in values.items()]
    return "".join([f"[{table}]\n"] * bool(table) + rows)
