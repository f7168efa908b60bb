"""Samplers: each invites clients to train and selects whose update counts, with which weight.

Clients are numbered from 0.

The server's step for a parameter x that all clients train is, in update space (U_c = x_c − x),

    x ← x + η_g Σ_{c selected} (weight_c/total)·U_c.

It is unbiased for Σ_c (D_c/ΣD) U_c if weight_c = D_c/Pr(c is selected) and total = ΣD over every client that could have
been selected.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from sharding.client_sampling.network import Profiles
from sharding.errors import UserError, safe_repr
from sharding.rng import generator
from sharding.rounds.failures import Failure
from sharding.rounds.plan import Client
from sharding.validation import Vector, as_floats, as_whole, is_number


@dataclass(frozen=True)
class Population:
    """What the server knows of all clients before any training.

    Attributes:
        num_samples: (N,) D_c.
        costs: (N,) r_c, the cost of an update of c in whole models: its bytes over those of the dense model.
        profiles: the clients' speeds; None where time is not simulated.
    """

    num_samples: Vector
    costs: Vector
    profiles: Profiles | None = None

    def __post_init__(self) -> None:
        for name in ("num_samples", "costs"):
            object.__setattr__(self, name, as_floats(getattr(self, name), name))
        if not isinstance(self.profiles, Profiles | None):
            raise UserError(
                f"profiles is {safe_repr(self.profiles)}; pass Profiles(compute, communicate, bandwidth), or None"
            )

    def check(self, num_clients: int) -> None:
        """Check that there is a valid size, cost and time for each of `num_clients` clients.

        Raises:
            UserError: a wrong number of entries, sizes that are negative, not finite or all 0, or costs not above 0.
        """
        sizes, costs = self.num_samples, self.costs
        times = () if self.profiles is None else (self.profiles.compute, self.profiles.communicate)
        if any(np.shape(column) != (num_clients,) for column in (sizes, costs, *times)):
            raise UserError(
                f"the population is not one of {num_clients} clients; give a size, a cost and times for each"
            )
        if not (np.isfinite(sizes).all() and sizes.min() >= 0 and sizes.sum() > 0):
            raise UserError("num_samples of the population must be finite, at least 0, and not all 0")
        if not (np.isfinite(costs) & (costs > 0)).all():
            raise UserError("costs of the population must be finite and above 0")


@dataclass(frozen=True)
class Participation:
    """The clients that upload in a round, and the weights of their updates.

    Attributes:
        weights: the weights D_c k_c/p_c by client that uploads, where c was drawn k_c times.
        total: the divisor of the weights of parameters that all clients train; None: the sum of the weights, which
            makes a plain average.
        rejected: clients whose report could not be used, and why.
        metrics: numbers to be recorded: `improvement_alpha` and `improvement_gamma` where clients report norms.
        report_bytes: the bytes that all clients together send before the server selects. Its answer is not counted.
        download_bytes: the bytes that are sent to all clients together in addition to their shards.
        draws: how many times each client was drawn, if that can be more than one. A client that is drawn twice sends
            twice in the simulated time of a round (Luo et al. 2024, Eqs. 4 and 22), but its bytes travel once.
    """

    weights: Mapping[Client, float]
    total: float | None = None
    rejected: Mapping[Client, Failure] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    report_bytes: int = 0
    download_bytes: int = 0
    draws: Mapping[Client, int] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class Sampler:
    """Invites `per_round` of `num_clients` clients, every set equally likely, and averages all of their updates.

    Subclasses override `invite` and `select`. Keyword-only parameters of a subclass's constructor are its options.

    Attributes:
        name: the sampler's key in `SAMPLERS`.
        needs_norms: `select` needs the norm of every update. A client keeps its update until it is selected; only its
            norm is sent before.
        num_clients: N.
        per_round: clients a round, or draws with replacement; 1…N.
        seed: the draws of round t depend only on (seed, t).
        population: sizes, costs and speeds; by default equal sizes, whole models and no clock.

    Raises:
        UserError: a number out of range.
    """

    num_clients: int
    per_round: int
    seed: int
    population: Population = None  # type: ignore[assignment]  # set from num_clients

    name = ""
    needs_norms = False

    def __post_init__(self) -> None:
        self.seed = as_whole(self.seed, "seed", least=0)
        n = self.num_clients = as_whole(self.num_clients, "num_clients")
        self.per_round = as_whole(self.per_round, "per_round", most=n)
        self.population = Population(np.ones(n), np.ones(n)) if self.population is None else self.population
        if not isinstance(self.population, Population):
            raise UserError(f"population is {safe_repr(self.population)}; pass a Population, or None")
        self.population.check(n)

    @property
    def lr_scales(self) -> Vector | None:
        """Factors of the clients' learning rates, (N,); None where all clients take the same."""
        return None

    def state_dict(self) -> dict[str, Tensor]:
        """Return what the sampler has learned and a resumed run needs again; nothing by default."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what a sampler of the same population had learned."""

    def invite(self, round: int) -> list[int]:
        """Return the round's cohort, ascending and without repetitions."""
        return uniform_cohort(self.num_clients, self.per_round, self.seed, round)

    def cohort(self, round: int) -> list[int]:
        """Return the clients that `invite` invites, checked.

        Raises:
            UserError: not a list of existing clients, ascending and each once; or `round` is not a whole number of at
                least 0.
        """
        round = as_whole(round, "round", least=0)
        cohort = list(self.invite(round))
        if cohort != sorted({*cohort}) or (cohort and not 0 <= cohort[0] <= cohort[-1] < self.num_clients):
            raise UserError(
                f"the sampler {self.name} invites {safe_repr(cohort)} in round {round}; a list of clients is needed, "
                f"ascending and each once, of 0 to {self.num_clients - 1}"
            )
        return cohort

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Return the clients that upload.

        Args:
            round: t.
            cohort: the clients invited.
            norms: ‖U_c‖ of the clients that reported, if the sampler `needs_norms`; else empty.
        """
        weights: dict[Client, float] = {client: float(self.population.num_samples[client]) for client in cohort}
        return Participation(weights)


@dataclass(eq=False, repr=False)
class BudgetSampler(Sampler):
    """A sampler of uploads.

    Attributes:
        budget: m, the expected number of uploads.

    Raises:
        UserError: the budget is not a finite number above 0 and at most `per_round`.
    """

    budget: float = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.budget) and 0 < self.budget <= self.per_round):
            raise UserError(
                f"budget is {safe_repr(self.budget)}; the expected number of uploads is needed, above 0 and at most "
                f"per_round={self.per_round}"
            )
        self.budget = float(self.budget)


class WithReplacement:
    """K draws by q: client j, drawn k_j times, counts p_j k_j/(K q_j) with p_j = D_j/ΣD, which is unbiased."""

    def __init__(self, q: Vector, num_draws: int, rng: np.random.Generator) -> None:
        self.counts = np.bincount(rng.choice(q.size, num_draws, p=q / q.sum()), minlength=q.size)
        self._expected = num_draws * q

    @property
    def cohort(self) -> list[int]:
        """The clients drawn, ascending."""
        return np.flatnonzero(self.counts).tolist()

    def participation(self, num_samples: Vector) -> Participation:
        """Return every client drawn, once, with the weight of all its draws."""
        weights: dict[Client, float] = {
            j: float(num_samples[j] * self.counts[j] / self._expected[j]) for j in self.cohort
        }
        return Participation(weights, float(num_samples.sum()), draws={j: int(self.counts[j]) for j in self.cohort})


def uniform_cohort(num_clients: int, per_round: int, seed: int, round: int) -> list[int]:
    """Return `per_round` clients, every set equally likely, ascending."""
    rng = generator(seed, "invite", round)
    return sorted(rng.choice(num_clients, per_round, replace=False).tolist())


def upload_coins(seed: int, round: int, num_clients: int) -> Vector:
    """Return each client's uniform number in [0, 1), (N,). It uploads if the number is below its p."""
    return generator(seed, "hear", round).random(num_clients)  # another word would change the results of studies
