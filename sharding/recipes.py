"""The two recipes as ready-made servers: the published algorithm, and ours.

The program's `configs/recipes` says the same, and `docs/results/beyond.md` what each part of ours is worth. A client's
`train_shard` takes the recipe's learning rate.
"""

from collections.abc import Mapping
from statistics import median_low

from torch import nn
from torch.optim import SGD

from sharding.errors import UserError
from sharding.factorization import factorize, merge
from sharding.rounds.aggregation.iterate_average import iterate_average
from sharding.rounds.plan import Client
from sharding.rounds.planner import ShardPlanner, checked_ratios
from sharding.rounds.server import Server
from sharding.validation import typed

PUBLISHED_LR = 0.1
TUNED_LR = 0.02


@typed
def published(model: nn.Module, seed: int = 0) -> Server:
    """Return a server of the published algorithm: the strategy `collective`, and the average as the new model.

    Args:
        model: a dense model, which is trained in place.
        seed: the seed of the draws.

    Source: Korzhenkov & Louizos, NeurIPS 2024 (arXiv 2410.24106).
    """
    return Server(model, ShardPlanner("collective", seed=seed, tail_format=None))


@typed
def tuned(model: nn.Module, keep_ratios: Mapping[Client, float], seed: int = 0) -> Server:
    """Return a server of our recipe: a low-rank start, `top_n`, Nesterov momentum, and an average of the models.

    The start has the rank that the median client affords, so that a few very weak clients do not shrink it.

    Args:
        model: dense. The server trains a copy of low rank, or this model where the median client affords all terms:
            `Server.model`. The one to evaluate is `Server.result`.
        keep_ratios: r of every client that may take part.
        seed: the seed of the draws.

    Raises:
        UserError: as `factorize`.
    """
    if not keep_ratios:
        raise UserError("keep_ratios is empty; pass r of every client that may take part")
    ratio = median_low(checked_ratios(keep_ratios).values())
    start = model if ratio == 1 else merge(factorize(model, ratio))
    optimizer = SGD(start.parameters(), lr=0.4, momentum=0.8, nesterov=True)
    return Server(start, ShardPlanner("top_n", seed=seed), optimizer, iterate_average(start))
