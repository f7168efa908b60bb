"""The server's app, which Flower runs: one training run in its directory, as by `python -m train run`."""

import logging
import shlex
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from sharding.errors import UserError
from sharding.rounds.plan import Client
from train.callbacks import EachRound
from train.config.naming import with_directory
from train.config.schema import Config, load_config
from train.data import Dataset
from train.data.shares import Shares
from train.experiment.assembly import build_experiment, find_device, read_dataset
from train.experiment.clients import Clients
from train.experiment.experiment import Experiment
from train.federate.nodes_engine import NodesEngine
from train.federate.roster import Report, Roster, Timeouts
from train.run import run
from train.rundir.file_names import METRICS_FILE
from train.rundir.records import clients_file, read_clients
from train.utils.errors import RunError
from train.utils.jsonl import read_lines

ROOT = Path(__file__).parents[2]  # what the names of configurations are relative to
ENGINE = "sequential"  # a node trains one client
CHECKPOINT_EVERY = 1
EXPLAINED = (UserError, RunError, ImportError)  # errors whose message is for the user, as that a package is missing
MAX_SHARE = 0.5  # of a round's weights: the server cannot check how many samples a node has

log = logging.getLogger(__name__)
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with `config` and `overrides` of Flower's run configuration; log in one line why a run ends early."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stdout)
    logging.getLogger("train").setLevel(logging.INFO)
    logging.getLogger("models").setLevel(logging.INFO)
    settings = dict(context.run_config)
    try:
        config = read(settings)
        timeouts = Timeouts(float(settings["start-timeout"]), float(settings["round-timeout"]))
        train(config, grid, timeouts)
    except EXPLAINED as error:
        log.error("the run ends: %s", error)  # raising it would print two of Flower's tracebacks


def read(settings: dict[str, Any]) -> Config:
    """Return the configuration of Flower's run configuration."""
    overrides = shlex.split(settings["overrides"])
    return federated(with_directory(load_config(ROOT / settings["config"], overrides), overrides))


def federated(config: Config) -> Config:
    """Return the configuration with a checkpoint each round and a bound on each client's weight."""
    update: dict[str, Any] = {"engine": ENGINE, "checkpoint_every": CHECKPOINT_EVERY}
    if config.aggregation.max_share is None and config.privacy is None:  # with privacy all clients count alike
        update["aggregation"] = config.aggregation.model_copy(update={"max_share": MAX_SHARE})
    return config.model_copy(update=update)


def train(config: Config, grid: Grid, timeouts: Timeouts) -> None:
    """Train, or resume an interrupted run, and report how it ends.

    Raises:
        UserError, RunError: as `train.run.run`.
        ImportError: a package is missing.
    """
    done = len(read_lines(config.directory / METRICS_FILE))
    begin = "resuming" if done else "starting"
    log.info("writing to %s, %s with round %d of %d", config.directory, begin, done, config.rounds)
    build = partial(assemble_over, grid=grid, timeouts=timeouts, device=config.device)
    with ThreadPoolExecutor(1) as apart:  # Flower handles signals and ends this process at once
        running = apart.submit(run, config, [EachRound(report)], resume=True, build=build)
        while not running.done():
            wait([running], timeout=0.5)  # wake up from time to time: Flower checks for a dead parent from a thread
        running.result()
    log.info("finished: %s", config.directory)


def report(metrics: Mapping[str, Any]) -> None:
    """Log one round and its failures."""
    for client, reason in metrics.get("failures", {}).items():  # with privacy they are logged before
        log.warning("client %s is left out of round %s: %s", client, metrics["round"], reason)
    accuracy = metrics.get("test_accuracy")
    tested = f", test accuracy {100 * accuracy:.1f} %" if isinstance(accuracy, float) else ""
    tested += f", ε {metrics['epsilon']:.3g}" if isinstance(metrics.get("epsilon"), float) else ""
    if "num_aggregated" in metrics:
        used = (metrics["num_aggregated"], metrics["num_clients"], metrics["seconds"])
        tested = ": averaged {} of {} updates, {:.1f} s".format(*used) + tested
    log.info("round %s%s", metrics["round"], tested)


def check_federated(config: Config) -> None:
    """Raise a UserError that names a setting which needs the clients' data at the server."""
    for is_set, name in (
        (config.tasks, "tasks"),
        (config.alignment, "alignment"),
        (config.evaluate_training, "evaluate_training"),
        (config.clients.pilot_losses, "clients.pilot_losses"),
    ):
        if is_set:
            raise UserError(f"{name} needs the clients' data at the server; leave it out of a federation")
    if config.clients.sampler.name == "aocs":
        raise UserError("clients.sampler=aocs needs a secure sum, which Flower lacks; choose ocs, or simulate it")


def assemble_over(config: Config, grid: Grid, timeouts: Timeouts, device: str | None = None) -> Experiment:
    """Build everything that a run with nodes needs. A device is that of the nodes, if not of the configuration.

    Raise a UserError if a setting needs the clients' data here, or nodes are missing.
    """
    check_federated(config)
    dataset = read_dataset(config).without_training().to(find_device(config.device))
    roster = Roster(grid, config_for_nodes(config, dataset, device), timeouts, *recall(config))
    roster.gather()
    reports: list[tuple[Client, Report]] = sorted(roster.reports.items())
    ratios = {client: report.keep_ratio for client, report in reports}
    samples = {client: report.num_samples for client, report in reports}
    total, most = sum(samples.values()), config.aggregation.max_share or MAX_SHARE
    for client, size in samples.items():
        if config.privacy is None and size > most * total and most * len(samples) > 1:
            log.warning("client %s reports %d of all %d samples; max_share bounds its weight", client, size, total)
    nobody = Shares(dataset.train.inputs, dataset.train.targets, [])
    clients = Clients(nobody, samples, ratios, roster.node_keys())
    return build_experiment(config, dataset, clients, partial(NodesEngine, roster))


def config_for_nodes(config: Config, dataset: Dataset, device: str | None = None) -> Config:
    """Return the configuration that the nodes get, with their device and the shape of the server's images.

    It has no privacy, which is the server's, as is its secret seed.

    The images of a node may all be gray, or have another size.
    """
    changes: dict[str, Any] = {"device": device or config.device, "privacy": None}  # which has the secret seed
    if config.data.takes("shape") and len(dataset.input_shape) == 3:
        changes["data"] = config.data.model_copy(update={"shape": dataset.input_shape})
    return config.model_copy(update=changes)


def recall(config: Config) -> tuple[dict[int, Report], dict[int, str]]:
    """Return each client's first report in the directory's run, and digests of the nodes' keys; empty without a run.

    Raise a UserError if the file is damaged.
    """
    nobody: dict[str, Any] = {"samples": [], "keep_ratios": [], "node_keys": []}
    clients = read_clients(config.directory, clients_file(config)).get(config.name, nobody)
    reports = dict(enumerate(map(Report, clients["keep_ratios"], clients["samples"])))
    return reports, {client: key for client, key in enumerate(clients["node_keys"]) if key}
