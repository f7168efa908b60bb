"""What a sampler is: it invites clients to train, and says who of them is heard, with which weight.

The server's step for a parameter x that all clients train is, in update space (U_c = x_c − x),

    x ← x + η_g Σ_{c heard} (weight_c/total)·U_c,

unbiased for Σ_c (D_c/ΣD) U_c whenever weight_c = D_c/Pr(c is heard) and total = ΣD over all who might have been.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sharding.client_sampling.network import Profiles
from sharding.errors import Failure, UserError, shown
from sharding.rng import generator
from sharding.validation import as_floats, is_number, is_whole

Client = int | str  # as in `sharding.planner`; samplers number them from 0
Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Population:
    """All clients, as the server knows them before any training.

    Attributes:
        num_samples: (N,) D_c.
        costs: (N,) r_c, what hearing c costs, in whole models: the bytes of its shard over those of the dense model.
        profiles: how fast they are; None where time is not simulated.
    """

    num_samples: Vector
    costs: Vector
    profiles: Profiles | None = None

    def __post_init__(self) -> None:
        for name in ("num_samples", "costs"):
            object.__setattr__(self, name, as_floats(getattr(self, name), name))

    def check(self, num_clients: int) -> None:
        """Make sure that all of it can be true of so many clients.

        Raises:
            UserError: a number too few or too many, sizes that are not finite, negative or all 0, costs not above 0.
        """
        sizes, costs = self.num_samples, self.costs
        times = () if self.profiles is None else (self.profiles.compute, self.profiles.communicate)
        if any(np.shape(column) != (num_clients,) for column in (sizes, costs, *times)):
            raise UserError(f"the population is not one of {num_clients} clients; one size, cost and time for each")
        if not (np.isfinite(sizes).all() and sizes.min() >= 0 and sizes.sum() > 0):
            raise UserError("num_samples of the population must be finite, at least 0, and not all 0")
        if not (np.isfinite(costs) & (costs > 0)).all():
            raise UserError("costs of the population must be finite and above 0")


@dataclass(frozen=True)
class Participation:
    """Who uploads after training, and how their updates count.

    Attributes:
        weights: of those who upload: D_c k_c/p_c, k_c being how often c was drawn.
        total: what the weights are divided by for the parameters that all clients train; None for their own sum, a
            plain average.
        rejected: whose report could not be used, and why.
        metrics: to record: `improvement_alpha` and `improvement_gamma` where clients report.
        report_bytes: what all clients together sent before it was decided who uploads. (What the server answers, a few
            numbers for all, is not counted.)
        draws: how often each was drawn, where that may be more than once: who is drawn twice sends twice in the
            simulated time of a round (Luo et al. 2024, Eqs. 4 and 22), though its bytes travel once.
    """

    weights: Mapping[Client, float]
    total: float | None = None
    rejected: Mapping[Client, Failure] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    report_bytes: int = 0
    draws: Mapping[Client, int] = field(default_factory=dict)


class Sampler:
    """Invites `per_round` of `num_clients` clients and hears all of them; subclasses choose otherwise.

    Args:
        num_clients: N.
        per_round: how many clients, or draws with replacement, a round; 1…N without replacement.
        seed: the draws of round t depend on (seed, t) alone.
        population: sizes, costs and speeds; equal sizes, whole models and no clock by default.
        replacement: whether the same client may be drawn several times.
        budget: m, the expected number of uploads, of the samplers that ask for reports.
        beta_over_alpha: β/α of the wireless sampler.
        signal: what the sampler of several tasks goes by.

    Raises:
        UserError: a number out of range, or an option that this sampler has no use for.
    """

    name = ""
    asks = False  # whether it must be told the norm of every update before it says who is heard
    has_budget = False  # whether only some of those who train upload
    may_replace = False
    chooses_tasks = False  # whether it chooses for which of several models each client works
    timed = False  # whether it must know how fast the clients are
    weighs_costs = False  # whether it goes by what hearing each client costs

    def __init__(
        self,
        num_clients: int,
        per_round: int,
        seed: int,
        population: Population | None = None,
        *,
        replacement: bool = False,
        budget: float | None = None,
        beta_over_alpha: float | None = None,
        signal: str | None = None,
    ) -> None:
        for name, number in (("count", num_clients), ("per_round", per_round)):
            if not is_whole(number):
                raise UserError(f"clients.{name} is {shown(number)}; a whole number is needed")
        if not 1 <= per_round <= num_clients:
            raise UserError(
                f"clients.per_round is {per_round}, but there are {num_clients} clients; choose 1 to {num_clients}"
            )
        self.num_clients, self.per_round = int(num_clients), int(per_round)
        self.seed = seed
        self.population = population or Population(np.ones(num_clients), np.ones(num_clients))
        self.population.check(num_clients)
        self.replacement = replacement
        for name, option in (("budget", budget), ("beta_over_alpha", beta_over_alpha)):
            if option is not None and not is_number(option):
                raise UserError(f"clients.{name} is {shown(option)}; a finite number is needed")
        self.budget = budget or 0.0
        self.beta_over_alpha = beta_over_alpha or 0.0
        self.signal = signal
        self._refuse_what_does_nothing()
        if self.beta_over_alpha < 0:
            raise UserError(f"clients.beta_over_alpha is {beta_over_alpha}; a number of at least 0 is needed")
        if self.has_budget and not 0 < self.budget <= per_round:
            raise UserError(
                f"clients.budget is {budget}; the expected number of uploads is needed, above 0 and at most "
                f"clients.per_round={per_round}"
            )
        if self.timed and population is not None and population.profiles is None:
            raise UserError(f"clients.sampler={self.name} needs network.bandwidth=…, the band that all clients share")

    @property
    def step_scales(self) -> Vector | None:
        """What each client's step size is multiplied by, (N,); None where all take the same."""
        return None

    @property
    def gradient_norms(self) -> Vector | None:
        """What the sampler has learned of the clients and a resumed run must know again: (N,), or None."""
        return None

    def restore(self, gradient_norms: Vector) -> None:
        """Take up what an earlier run of the same configuration had learned."""

    def invite(self, round: int) -> list[int]:
        """Return the round's cohort, ascending, without repetitions."""
        raise NotImplementedError

    def cohort(self, round: int) -> list[int]:
        """Return whom `invite` invites, looked over.

        Raises:
            UserError: not a list of clients there are, ascending and each once.
        """
        cohort = list(self.invite(round))
        if cohort != sorted({*cohort}) or (cohort and not 0 <= cohort[0] <= cohort[-1] < self.num_clients):
            raise UserError(
                f"the sampler {self.name} invites {shown(cohort)} in round {round}; a list of clients is needed, "
                f"ascending and each once, of 0 to {self.num_clients - 1}"
            )
        return cohort

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Return who uploads.

        Args:
            round: t.
            cohort: as invited.
            norms: ‖U_c‖ of those who reported, where the sampler `asks`; else empty.
        """
        weights: dict[Client, float] = {client: float(self.population.num_samples[client]) for client in cohort}
        return Participation(weights)

    def _refuse_what_does_nothing(self) -> None:
        given = {
            "replacement": (self.replacement, self.may_replace, "uniform or weighted"),
            "budget": (self.budget, self.has_budget, "ocs, aocs, ocs_partial, uniform_upload or mmfl"),
            "beta_over_alpha": (self.beta_over_alpha, self.timed, "wireless"),
            "signal": (self.signal, self.chooses_tasks, "mmfl"),
        }
        for option, (value, used, users) in given.items():
            if value and not used:
                raise UserError(f"clients.{option}={value} does nothing for the sampler {self.name}; it is for {users}")


class WithReplacement:
    """K draws by q: client j, drawn k_j times, counts p_j k_j/(K q_j) with p_j = D_j/ΣD, which is unbiased."""

    def __init__(self, q: Vector, num_draws: int, rng: np.random.Generator) -> None:
        self.counts = np.bincount(rng.choice(q.size, num_draws, p=q / q.sum()), minlength=q.size)
        self._expected = num_draws * q

    @property
    def cohort(self) -> list[int]:
        """The clients drawn, ascending."""
        return np.flatnonzero(self.counts).tolist()

    def heard(self, num_samples: Vector) -> Participation:
        """Return everyone drawn, each once, with the weight of all its draws."""
        weights: dict[Client, float] = {
            j: float(num_samples[j] * self.counts[j] / self._expected[j]) for j in self.cohort
        }
        return Participation(weights, float(num_samples.sum()), draws={j: int(self.counts[j]) for j in self.cohort})


def uniform_cohort(num_clients: int, per_round: int, seed: int, round: int) -> list[int]:
    """Return `per_round` clients, every set equally likely, ascending."""
    rng = generator(seed, "invite", round)
    return sorted(rng.choice(num_clients, per_round, replace=False).tolist())


def upload_coins(seed: int, round: int, num_clients: int) -> Vector:
    """Return every client's draw in [0, 1), (N,): it uploads where that is below its p. Each can make its own."""
    return generator(seed, "hear", round).random(num_clients)
