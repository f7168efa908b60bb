"""Build the parts of a run from a configuration."""

from collections.abc import Callable, Collection, Mapping
from statistics import median_low
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from models import build_model, load_pretrained
from sharding import Gaussian, Server, ShardPlanner, Strategy, factorize, iterate_average, merge
from sharding.client_sampling import Population, Profiles, Sampler
from sharding.errors import UserError, join_first, lookup, safe_repr
from sharding.factorization.shardable import ENDS, Patterns
from sharding.factorization.support import TO_SEND, check_supported
from sharding.modules.checkpointing import check_has_blocks
from sharding.rng import generator, seed_of
from sharding.rounds.failures import one_line
from sharding.rounds.plan import Client
from sharding.terms.designs import fit
from train.config.parts import Part
from train.config.schema import Config
from train.data import Dataset, load_dataset
from train.data.dataset import checked, hold_out
from train.data.partition import Partition, partition
from train.data.shares import Shares
from train.engines import ENGINES, Engine, Job
from train.engines.local_training import make_optimizer
from train.engines.memory_format import channels_last
from train.engines.sequential import check_compiler
from train.experiment.budget import sampling_of, spent_epsilon
from train.experiment.clients import Clients
from train.experiment.experiment import Experiment
from train.utils.stages import set_stage


def assemble(config: Config) -> Experiment:
    """Build everything that a run of one model needs; writes nothing.

    Raises:
        UserError: a missing data folder, a model option that does not exist, a device that is not there, a design or
            a sampler that cannot draw.
    """
    assert not config.tasks  # `train.variants.multi_model.assemble_models` builds several models
    return build_experiment(config, *simulate_clients(config))


def simulate_clients(config: Config) -> tuple[Dataset, Clients, Callable[[Job], Engine]]:
    """Return the dataset without its training split, the clients on this machine, and what creates their engine."""
    engine = find_engine(config)
    device = find_device(config.device)
    if config.local.compile:
        set_stage("trying the compiler")
        check_compiler(device)
    set_stage(f"reading {config.data.name}")
    dataset = read_dataset(config).to(device)
    set_stage(f"distributing {config.data.name} among {config.clients.count} clients")
    shares = partition_dataset(config, dataset)
    keep_ratios = assign_keep_ratios(config.keep_ratio, len(shares), config.seed_of_data)
    num_samples: dict[Client, int] = {client: len(data) for client, data in shares.items()}
    return dataset.without_training(), Clients(shares, num_samples, keep_ratios), engine


def read_dataset(config: Config, **options: Any) -> Dataset:
    """Load the configured dataset, with other options than the configured ones if given.

    Raise a UserError if it is not there, or has fewer samples than are held out.
    """
    data = config.data
    dataset = load_dataset(data.name, **data_options(config) | options)
    return dataset if data.holdout is None else checked(hold_out(dataset, data.holdout, config.seed_of_data))


def data_options(config: Config) -> dict[str, Any]:
    """Return the dataset's options; some that are not set follow from the model and the partition."""
    model, data, scheme = config.model.options, config.data, config.data.partition
    implied = {
        "tokenizer": model.get("weights"),
        "weights": model.get("weights") if config.model.name == "transformers" else None,
        "task": model.get("task"),
        "client": scheme.options["column"] if scheme.name == "column" else None,
    }
    given = {key: value for key, value in data.options.items() if value is not None}
    return {key: str(value) for key, value in implied.items() if value and data.takes(key)} | given


def build_experiment(
    config: Config,
    dataset: Dataset,
    clients: Clients,
    make_engine: Callable[[Job], Engine],
    sampler: Sampler | None = None,
) -> Experiment:
    """Build the parts that train one model.

    The dataset, without its training split, is on the device. The sampler is by default the configured one, which knows
    what shards cost.
    """
    keep_ratios, num_samples = clients.keep_ratios, clients.num_samples
    set_stage(f"building {config.model.name}")
    planner = make_planner(config)
    built = make_model(config, dataset).to(dataset.test.targets.device)
    check_fit(config.model.name, built, dataset)
    if config.local.checkpoint:
        check_has_blocks(built)
    privacy = make_privacy(config, keep_ratios)
    dense, model = dense_nbytes(built), first_model(config, built, planner.strategy, keep_ratios.values())
    fit([0.5, 0.5], config.design)  # fails now if it cannot draw
    check_optimizers(config, dataset.test.targets.device)
    local = config.local
    if local.steps is None:  # no batch of an epoch is larger than its client's data
        local = local.model_copy(update={"batch_size": min(local.batch_size, max(num_samples.values()))})
    if sampler is None:
        nbytes = {ratio: planner.nbytes(model, ratio) for ratio in set(keep_ratios.values())}  # an update has no tail
        costs = {client: nbytes[ratio] / dense for client, ratio in keep_ratios.items()}
        seed = config.seed if privacy is None else privacy.seed  # who takes part is secret
        sampler = make_sampler(config, num_samples, costs, seed)
    sampler.cohort(0)  # fails now if it cannot draw
    scales: dict[Client, float] = {} if sampler.lr_scales is None else dict(enumerate(sampler.lr_scales.tolist()))
    server = make_server(config, model, planner, privacy)
    named = ":" in config.device  # as cuda:1, and not cuda or auto
    job = Job(model, clients.data, dataset, local, config.seed, config.plugins, scales, server.frozen, named)
    return Experiment(config, dataset, clients, server, sampler, dense, job, make_engine)


def first_model(config: Config, model: nn.Module, strategy: Strategy, keep_ratios: Collection[float]) -> nn.Module:
    """Return the server's model; with `init=low_rank` of the rank that the median client affords.

    So a few very weak clients do not shrink the start of the others. With a residual the model stays in factors, as
    many as the strongest client affords. Strategies that send all terms start from the full-rank model.

    Raises:
        UserError: that would cut off a part of pretrained weights for good.
    """
    afforded = median_low(keep_ratios) if config.residual is None else max(keep_ratios)
    ratio = 1.0 if strategy.allocate is None else strategy.keep_ratio or afforded
    if config.residual is not None:
        return factorize(model, ratio, skip=skipped_layers(config), residual_format=config.residual)
    if config.init == "as_built" or ratio == 1:
        return model
    small = factorize(model, ratio, skip=skipped_layers(config))
    if config.model.weights is not None:
        report: Any = small.factorize_report
        lost = 100 * (1 - np.mean([layer.energy for layer in report.layers.values()]))
        raise UserError(
            f"init=low_rank would cut off {lost:.0f} % of the energy of the pretrained layers, for good; set "
            "residual=int4, which keeps the rest on the clients, frozen, or init=as_built"
        )
    return merge(small)


def check_fit(name: str, model: nn.Module, dataset: Dataset) -> None:
    """Give a model two test samples, so that a model of another dataset fails before the first round.

    Raises:
        UserError: the model cannot read the samples, does not return logits of their classes, reads the tokens that it
            predicts, has nothing to train, or has state that no checkpoint holds.
    """
    check_supported(model, TO_SEND)
    if unsaveable := [key for key, entry in model.state_dict().items() if not isinstance(entry, Tensor)]:
        raise UserError(f"{join_first(unsaveable)} of the model {name} cannot be saved; make it a buffer")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"the model {name} has no parameter to train; set requires_grad")
    inputs, targets, seen = dataset.test.inputs[:2], dataset.test.targets[:2], False
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = model.eval()(channels_last(dataset.prepare(inputs)))
            if targets.ndim > 1 and inputs.shape[1] > 1:  # each target follows its input
                changed = inputs.clone()
                changed[:, -1] = (changed[:, -1] + 1) % dataset.num_classes
                seen = not torch.allclose(logits[:, :-1], model(dataset.prepare(changed))[:, :-1], 1e-5, 1e-6)
    except Exception as error:  # the model and `prepare` may be anybody's
        raise UserError(
            f"the model {name} cannot read the samples of {dataset.name}: {type(error).__name__}: {one_line(error)}"
        ) from error
    shape, expected = tuple(getattr(logits, "shape", ())), (*targets.shape, dataset.num_classes)
    if shape[:-1] != expected[:-1] or shape[-1] < expected[-1]:
        output = f"logits of shape {shape}" if isinstance(logits, Tensor) else safe_repr(logits)
        raise UserError(f"the model {name} returns {output} for {len(targets)} samples; shape {expected} is needed")
    if seen:
        raise UserError(
            f"the model {name} reads the tokens that it predicts: its answers to the first tokens depend on the last. "
            "Choose a model that reads in one direction, such as GPT-2"
        )


def check_optimizers(config: Config, device: torch.device) -> None:
    """Raise a UserError if the clients' or the server's optimizer refuses an option, some only at a step."""
    local = config.local
    model = nn.ParameterList([torch.zeros(1, 1, device=device)])
    model[0].grad = torch.zeros_like(model[0])
    makers: list[tuple[Part, Callable[[], Optimizer]]] = [
        (local.optimizer, lambda: make_optimizer(model, local, local.optimizer.value("lr"))),
        (config.server_optimizer, lambda: make_server_optimizer(config, model)),
    ]
    for part, make in makers:
        try:
            make().step()
        except (AssertionError, RuntimeError, TypeError) as error:
            raise UserError(f"{part.registry.key}={part.name}: {error}") from error


def find_engine(config: Config) -> Callable[[Job], Engine]:
    """Return a function that creates the engine of this name.

    Raise a UserError for an unknown engine, or several threads for an engine with one per process.
    """
    if config.threads > 1 and config.engine != "sequential":
        raise UserError(f"threads={config.threads} needs engine=sequential; engine={config.engine} has one per process")
    return lookup(ENGINES, config.engine, "engine")


def make_sampler(
    config: Config, num_samples: Mapping[Client, int], costs: Mapping[Client, float], seed: int
) -> Sampler:
    """Build the sampler from the clients' sizes, costs and speeds."""
    clients, network, count = config.clients, config.network, len(num_samples)
    profiles = None
    if network is not None:
        rng = generator(config.seed_of_data, "profiles")
        profiles = Profiles.draw(count, network.bandwidth, rng, network.compute, network.communicate)
    sizes, relative_costs = (np.array(list(values.values()), dtype=np.float64) for values in (num_samples, costs))
    population = Population(sizes, relative_costs, profiles)
    return clients.sampler.build(count, clients.per_round, seed, population)


def skipped_layers(config: Config) -> Patterns:
    """Return the patterns of the layers that are sent whole: the configured ones, or those that the model names."""
    named: Patterns = getattr(config.model.registry[config.model.name], "skip", ENDS)
    return named if config.skip is None else config.skip


def make_planner(config: Config) -> ShardPlanner:
    """Return the planner of a run."""
    return ShardPlanner(
        config.strategy,
        config.design,
        config.seed,
        skip=skipped_layers(config),
        compression=config.compression,
        tail_format=config.tail,
        clip=config.local.clip,
    )


def make_server(config: Config, model: nn.Module, planner: ShardPlanner, privacy: Gaussian | None = None) -> Server:
    """Return the server, which holds the model and runs its rounds."""
    average = iterate_average(model) if config.result == "average" else None
    optimizer = make_server_optimizer(config, model)
    return Server(model, planner, optimizer, average, config.aggregation.max_share or 1.0, privacy)


def make_privacy(config: Config, keep_ratios: Mapping[Client, float]) -> Gaussian | None:
    """Return the mechanism of a run with privacy, or None.

    Raise a UserError if the budget allows no round, or a package is missing.
    """
    if config.privacy is None:
        return None
    first, most = spent_epsilon(config, 1), config.privacy.max_epsilon  # fails now if a package is missing
    if most is not None and first > most:
        raise UserError(
            f"privacy.max_epsilon={most:g} allows no round: the first one spends {first:.3g}; raise "
            "privacy.noise_multiplier, or lower clients.per_round"
        )
    given = config.privacy.secret_seed
    return Gaussian(
        clipping_norm=config.privacy.clipping_norm,
        noise_multiplier=config.privacy.noise_multiplier,
        keep_ratios=keep_ratios,
        per_round=config.clients.per_round,
        sampling=sampling_of(config),
        **({} if given is None else {"seed": given}),
    )


def make_server_optimizer(config: Config, model: nn.Module) -> Optimizer:
    """Return the configured optimizer of the server's model."""
    optimizer: Optimizer = config.server_optimizer.build(model.parameters())
    return optimizer


def dense_nbytes(model: nn.Module) -> int:
    """Return the bytes that dense FedAvg sends to a client."""
    return ShardPlanner("dense").nbytes(model, 1.0)


def make_model(config: Config, dataset: Dataset, pretrained: bool = True) -> nn.Module:
    """Build the server's model; its initial weights depend only on `data_seed` and on the configured weights.

    `pretrained=False` leaves out the configured weights, for a structure.
    """
    with torch.random.fork_rng(devices=[]), config.model.naming_key():
        torch.manual_seed(seed_of(config.seed_of_data, "model"))
        name, options = config.model.name, config.model.options
        facts = {"pad_token_id": dataset.pad_token_id, "class_names": dataset.class_names or None}
        known = {key: fact for key, fact in facts.items() if fact is not None and config.model.takes(key)}
        try:
            model = build_model(
                name, input_shape=dataset.input_shape, num_classes=dataset.num_classes, **known | options
            )
        except (RuntimeError, MemoryError, OverflowError) as error:
            raise UserError(f"the model {name} with {safe_repr(options)} cannot be built: {error}") from error
        if pretrained and config.model.weights is not None:
            load_pretrained(name, model, config.model.weights)
        return model


def partition_indices(config: Config, dataset: Dataset) -> Partition:
    """Return the indices of each client's training samples."""
    rng = generator(config.seed_of_data, "partition")
    scheme = config.data.partition
    return partition(scheme.name, dataset, config.clients.count, rng, **scheme.options)


def partition_dataset(config: Config, dataset: Dataset) -> Shares:
    """Give every client its samples."""
    parts = partition_indices(config, dataset)
    rows = torch.from_numpy(np.concatenate(parts)).to(dataset.train.targets.device)
    return Shares(dataset.train.inputs[rows], dataset.train.targets[rows], list(map(len, parts)))


def assign_keep_ratios(keep_ratio: float | Mapping[float, float], count: int, seed: int) -> dict[Client, float]:
    """Return each client's keep ratio: the shares rounded to whole clients, assigned at random, once for the run."""
    if not isinstance(keep_ratio, Mapping):
        return dict.fromkeys(range(count), keep_ratio)
    exact = np.array(list(keep_ratio.values())) * count
    counts = np.floor(exact + 1e-9).astype(int)
    largest = np.argsort(counts - exact, kind="stable")  # the largest remainders get the clients left over
    counts[largest[: count - counts.sum()]] += 1
    ratios = np.repeat(list(keep_ratio), counts)
    return dict(enumerate(generator(seed, "keep_ratio").permutation(ratios).tolist()))


def find_device(name: str) -> torch.device:
    """Return the device of that name, or raise a UserError; ``auto`` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).tolist()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UserError(f"device {safe_repr(name)} is not available here; use device=auto or device=cpu") from error
    return device
