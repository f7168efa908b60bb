"""The server's app, which Flower runs: one training run in its directory, as `python -m train run` has it."""

import logging
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from sharding.errors import UserError
from train.config import Config, load_config
from train.failures import RunError
from train.federate.nodes import Patience
from train.federate.server import assemble_over
from train.naming import with_directory
from train.rounds import Metrics
from train.run import run

ROOT = Path(__file__).parents[2]  # what the names of configurations are relative to
RUN_ENDS = "the run ends: "  # begins the line by which `launch` knows why
ENGINE = "sequential"  # a node trains one client

log = logging.getLogger(__name__)
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train as `config` and `overrides` of the run's configuration say, and tell in one line what was in the way."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stdout)
    logging.getLogger("train").setLevel(logging.INFO)
    try:
        _train(grid, dict(context.run_config))
    except (UserError, RunError) as error:
        log.error("%s%s", RUN_ENDS, error)  # raised, it would be two tracebacks of Flower's


def _train(grid: Grid, settings: dict[str, Any]) -> None:
    """Train; a run that was cut off goes on."""
    config = read(settings)
    patience = Patience(float(settings["start-timeout"]), float(settings["round-timeout"]))
    build = partial(assemble_over, grid=grid, patience=patience)
    with ThreadPoolExecutor(1) as apart:  # signals are Flower's: told to end, this process does so at once
        running = apart.submit(run, config, tell, resume=True, build=build)
        while not running.done():
            wait([running], timeout=0.5)  # awake now and then: Flower's watch for a dead parent signals from a thread
        running.result()
    log.info("finished: %s", config.directory)


def read(settings: dict[str, Any]) -> Config:
    """Return the configuration, of which the engine is replaced, and by which no round is lost."""
    overrides = shlex.split(settings["overrides"])
    config = with_directory(load_config(ROOT / settings["config"], overrides), overrides)
    return config.model_copy(update={"engine": ENGINE, "checkpoint_every": 1})


def tell(metrics: Metrics) -> None:
    """Log one round, and who is not in it."""
    failures = metrics["failures"]
    assert isinstance(failures, dict)
    for client, why in failures.items():
        log.warning("client %s is left out of round %s: %s", client, metrics["round"], why)
    accuracy = metrics.get("test_accuracy")
    tested = f", test accuracy {100 * accuracy:.1f} %" if isinstance(accuracy, float) else ""
    log.info(
        "round %s: %s of %s clients heard, %.1f s%s",
        metrics["round"],
        metrics["heard"],
        metrics["clients"],
        metrics["seconds"],
        tested,
    )
