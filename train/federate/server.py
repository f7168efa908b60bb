"""The parts of a run whose clients are nodes."""

from functools import partial

from flwr.serverapp import Grid

from sharding.errors import UserError
from sharding.planner import Client
from train.config import Config
from train.experiment import Experiment, find_device, put_together, read_dataset
from train.federate.engine import NodesEngine
from train.federate.messages import Card
from train.federate.nodes import Nodes, Patience
from train.local import Shares
from train.records import CLIENTS_FILE, read_clients


def check_federated(config: Config) -> None:
    """Refuse what cannot be had where the server has nobody's data.

    Raises:
        UserError: naming it.
    """
    for asked, name in (
        (config.tasks, "tasks"),
        (config.alignment, "alignment"),
        (config.evaluate_training, "evaluate_training"),
        (config.clients.pilot_losses, "clients.pilot_losses"),
    ):
        if asked:
            raise UserError(f"{name} needs the clients' data at the server; leave it out of a federation")


def assemble_over(config: Config, grid: Grid, patience: Patience) -> Experiment:
    """Build everything a run needs whose clients are nodes.

    Raises:
        UserError: something is asked for that needs the clients' data here; nodes are missing.
    """
    check_federated(config)
    dataset = read_dataset(config).without_training().to(find_device(config.device))
    nodes = Nodes(grid, config, patience, read_roster(config))
    nodes.gather()
    ratios: dict[Client, float] = {client: card.keep_ratio for client, card in sorted(nodes.roster.items())}
    samples: dict[Client, int] = {client: card.num_samples for client, card in sorted(nodes.roster.items())}
    nobody = Shares(dataset.train.inputs, dataset.train.targets, [])
    return put_together(config, dataset, nobody, ratios, samples, partial(NodesEngine, nodes))


def read_roster(config: Config) -> dict[int, Card]:
    """Return what the clients of the run that the directory holds have said of themselves, if there is one.

    Raises:
        UserError: the file is spoiled.
    """
    told = read_clients(config.directory).get(config.name, {"samples": [], "keep_ratios": []})
    try:
        pairs = zip(told["keep_ratios"], told["samples"], strict=True)
        return {client: Card(client, ratio, size) for client, (ratio, size) in enumerate(pairs)}
    except (ValueError, TypeError) as error:
        path = config.directory / CLIENTS_FILE
        raise UserError(f"cannot read {path}: {error}; delete it, and the nodes are asked anew") from error
