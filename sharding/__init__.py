"""Spectral model sharding: train one large model on many weak, unequal devices.

The server holds a full model. Each round it takes the SVD of every sharded layer and sends each client the few
singular terms that its keep ratio affords; the client trains them as U·Ω·Vᵀ; the server averages each vector on its
own.

``examples/one_round.py`` has a round on one screen, ``docs/reference/architecture.md`` says what each folder has, and
``docs/theory/symbols.md`` what the names in code stand for.
"""

from importlib.metadata import PackageNotFoundError, version

from sharding import recipes as recipes
from sharding.client_sampling import SAMPLERS, Population, Sampler
from sharding.errors import UserError
from sharding.factorization import Budget, Energy, factorize, merge, shardable_layers, unpack_attention
from sharding.factorization.lora import export_lora, freeze_except_factors
from sharding.factorization.save import load_factorized, save_factorized
from sharding.layers import FactorizedConv, FactorizedLayer, FactorizedLinear, register_layer
from sharding.modules.checkpointing import checkpoint_blocks
from sharding.rounds.aggregation.fed_yogi import FedYogi
from sharding.rounds.aggregation.iterate_average import iterate_average
from sharding.rounds.client import client_model, init_empty, train_shard
from sharding.rounds.frozen import Frozen
from sharding.rounds.optim import clip_and_decay
from sharding.rounds.plan import Plan
from sharding.rounds.planner import ShardPlanner
from sharding.rounds.privacy.gaussian import Gaussian
from sharding.rounds.server import Server
from sharding.rounds.shard import Shard, Update
from sharding.terms.designs import DESIGNS, draw_terms
from sharding.terms.inclusion import collective_inclusion, optimal_inclusion, successive_inclusion
from sharding.terms.strategies import STRATEGIES, Allocation, LayerContext, Strategy
from sharding.transport.compression import COMPRESSIONS

try:
    __version__ = version("spectral-sharding")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0"

__all__ = [  # noqa: RUF022 - by theme, as docs/reference/api.md lists it
    # Registries
    "STRATEGIES",
    "DESIGNS",
    "SAMPLERS",
    "COMPRESSIONS",
    # Models: factorize, prepare, save, export
    "factorize",
    "merge",
    "shardable_layers",
    "Energy",
    "Budget",
    "unpack_attention",
    "register_layer",
    "save_factorized",
    "load_factorized",
    "export_lora",
    "freeze_except_factors",
    # Factorized layers; the other kinds are in sharding.layers
    "FactorizedLayer",
    "FactorizedLinear",
    "FactorizedConv",
    # The server's side of a round
    "Server",
    "ShardPlanner",
    "Plan",
    "Shard",
    "Update",
    "Frozen",
    "Gaussian",
    "FedYogi",
    "iterate_average",
    # The client's side of a round
    "init_empty",
    "client_model",
    "train_shard",
    "clip_and_decay",
    "checkpoint_blocks",
    # Write a strategy or a sampler
    "Strategy",
    "Allocation",
    "LayerContext",
    "Sampler",
    "Population",
    # Inclusion probabilities and draws
    "optimal_inclusion",
    "collective_inclusion",
    "successive_inclusion",
    "draw_terms",
    # Errors
    "UserError",
]
