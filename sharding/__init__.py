"""Spectral model sharding: train one large model on many weak, unequal devices.

The server holds a full model. Each round it takes the SVD of every sharded layer and sends each client the few
singular terms that its keep ratio affords; the client trains them as U·Ω·Vᵀ; the server averages each vector on its
own.

Names in code follow these symbols:

======  ==================  ====================  =========================================================
symbol  name                shape                 meaning
======  ==================  ====================  =========================================================
W       ``weight``          (out, in)             a layer's matrix; a conv is (out, in·kh·kw)
N       ``rank``                                  min(out, in)
λ       ``magnitudes``      (N,)                  singular values, non-increasing, float64
u', v'  ``u``, ``v``        (out, N), (in, N)     √λᵢ·uᵢ, √λᵢ·vᵢ
r, n    ``keep_ratio``,                           n = ⌈N·r⌉, r in (0, 1], shared by all layers of a client
        ``num_terms``
π       ``inclusion``       (N,)                  Pr(term i is drawn), Σπ = n
ω       ``multipliers``     (N,) or (n,)          frozen diagonal of Ω
C       ``num_clients``                           clients of the same keep ratio in this round
τ       ``clip``                                  10 by default, ≥ 1
D_c     ``num_samples``                           size of client c's data
======  ==================  ====================  =========================================================
"""

from importlib.metadata import PackageNotFoundError, version

from sharding.aggregate import Aggregation, aggregate
from sharding.client import client_model, skeleton, train_shard
from sharding.clients import (
    SAMPLERS,
    Heard,
    Population,
    Sampler,
    aocs_probabilities,
    mmfl_probabilities,
    round_time,
    wireless_probabilities,
)
from sharding.compression import WIRES
from sharding.coordination import COORDINATIONS
from sharding.designs import DESIGNS, entropy, joint_inclusion, sample
from sharding.diagnostics import alignment, anme, discrepancy, plan_anme, plan_coverage, plan_discrepancy
from sharding.errors import UserError
from sharding.factorization import (
    Budget,
    CoverageWarning,
    Energy,
    factorize,
    factorize_empty,
    merge,
    shardable_layers,
    split_layers,
    unpack_attention,
)
from sharding.inclusion import (
    collective_inclusion,
    coordinated_inclusion,
    optimal_inclusion,
    schatten_inclusion,
    successive_inclusion,
)
from sharding.iterates import iterate_average
from sharding.layers import (
    FactorizedConv1d,
    FactorizedConv2d,
    FactorizedConv3d,
    FactorizedConvTranspose1d,
    FactorizedConvTranspose2d,
    FactorizedConvTranspose3d,
    FactorizedEmbedding,
    FactorizedLayer,
    FactorizedLinear,
    FactorizedTransposedLinear,
    SplitLinear,
    UnpackedAttention,
    register,
)
from sharding.lora import export_lora
from sharding.optim import (
    LocalSGD,
    ScaledSGD,
    clip_effective_lr,
    clip_factors,
    decay_multipliers,
    factorized_layers,
    frobenius_decay,
    scale_factors,
)
from sharding.planner import Plan, ShardPlanner
from sharding.save import load_factorized, save_factorized
from sharding.server import ServerOptimizer
from sharding.shard import Shard, Terms
from sharding.spectrum import Spectrum, decompose
from sharding.strategies import STRATEGIES, Group, Law, Strategy

try:
    __version__ = version("spectral-sharding")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0"

__all__ = [
    "COORDINATIONS",
    "DESIGNS",
    "SAMPLERS",
    "STRATEGIES",
    "WIRES",
    "Aggregation",
    "Budget",
    "CoverageWarning",
    "Energy",
    "FactorizedConv1d",
    "FactorizedConv2d",
    "FactorizedConv3d",
    "FactorizedConvTranspose1d",
    "FactorizedConvTranspose2d",
    "FactorizedConvTranspose3d",
    "FactorizedEmbedding",
    "FactorizedLayer",
    "FactorizedLinear",
    "FactorizedTransposedLinear",
    "Group",
    "Heard",
    "Law",
    "LocalSGD",
    "Plan",
    "Population",
    "Sampler",
    "ScaledSGD",
    "ServerOptimizer",
    "Shard",
    "ShardPlanner",
    "Spectrum",
    "SplitLinear",
    "Strategy",
    "Terms",
    "UnpackedAttention",
    "UserError",
    "aggregate",
    "alignment",
    "anme",
    "aocs_probabilities",
    "client_model",
    "clip_effective_lr",
    "clip_factors",
    "collective_inclusion",
    "coordinated_inclusion",
    "decay_multipliers",
    "decompose",
    "discrepancy",
    "entropy",
    "export_lora",
    "factorize",
    "factorize_empty",
    "factorized_layers",
    "frobenius_decay",
    "iterate_average",
    "joint_inclusion",
    "load_factorized",
    "merge",
    "mmfl_probabilities",
    "optimal_inclusion",
    "plan_anme",
    "plan_coverage",
    "plan_discrepancy",
    "register",
    "round_time",
    "sample",
    "save_factorized",
    "scale_factors",
    "schatten_inclusion",
    "shardable_layers",
    "skeleton",
    "split_layers",
    "successive_inclusion",
    "train_shard",
    "unpack_attention",
    "wireless_probabilities",
]
