"""The Gaussian mechanism over clients: what it clips to, how much noise it adds, and whom it takes for known.

A round releases the sum of the clients' clipped changes with noise, divided by the expected number of clients, as in
DP-FedAvg (McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018, with the fixed
denominator of their Section 2.2). Here a client's change is that of its terms and of what it trains whole, and zero in
all other coordinates.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from secrets import randbits

from sharding.errors import UserError, join_first, safe_repr
from sharding.rounds.plan import Client
from sharding.rounds.planner import checked_ratios
from sharding.rounds.privacy.accountant import Sampling, check_sampling, epsilon
from sharding.validation import as_whole, is_number


def secret_seed() -> int:
    """Return 256 random bits of the system."""
    return randbits(256)


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """Differential privacy of each client: its whole change is clipped, and the sums of changes get Gaussian noise.

    Public are these numbers, the keep ratios, and the draws of terms. Secret are the seed, and who takes part.

    Attributes:
        clipping_norm: B, the largest L2 norm of a client's change of all that it trains; longer ones are scaled to it.
        noise_multiplier: z; each coordinate of a sum gets noise of standard deviation z·B. With 0 there is no privacy.
        keep_ratios: r of every client that may take part, not only of a round's.
        per_round: the expected number of clients of a round, which divides the sums.
        sampling: the way a round's clients are drawn, which this trusts you to do: ``poisson``, each by its own coin of
            chance per_round/N (`sharding.client_sampling.PoissonSampler`); or ``fixed``, every set of per_round clients
            equally likely. The draw must be secret, too.
        seed: the seed of the noise: whoever knows it can take the noise away. By default random bits of the system.

    Raises:
        UserError: a number out of range.
    """

    clipping_norm: float
    noise_multiplier: float
    keep_ratios: Mapping[Client, float]
    per_round: float
    sampling: Sampling = "poisson"
    seed: int = field(default_factory=secret_seed, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keep_ratios", checked_ratios(self.keep_ratios))
        object.__setattr__(self, "seed", as_whole(self.seed, "seed", least=0))
        if not (is_number(self.clipping_norm) and self.clipping_norm > 0):
            raise UserError(f"clipping_norm is {safe_repr(self.clipping_norm)}; pass a positive number, such as 1.0")
        check_sampling(self.noise_multiplier, len(self.keep_ratios), self.per_round, self.sampling)

    @property
    def expected(self) -> dict[float, float]:
        """The expected number of a round's clients of each keep ratio."""
        chance = self.per_round / len(self.keep_ratios)
        counts: dict[float, float] = {}
        for ratio in self.keep_ratios.values():
            counts[ratio] = counts.get(ratio, 0.0) + chance
        return counts

    def check(self, keep_ratios: Mapping[Client, float]) -> None:
        """Raise a UserError if a client of a round is not known, or with another keep ratio."""
        ratios = checked_ratios(keep_ratios)
        if strange := [client for client, ratio in ratios.items() if self.keep_ratios.get(client) != ratio]:
            raise UserError(f"the keep ratios of privacy=Gaussian(…) lack {join_first(strange)}, or have another one")

    def epsilon(self, rounds: int, delta: float) -> float:
        """Return ε of (ε, δ)-differential privacy after these rounds.

        Raises:
            UserError: as `sharding.rounds.privacy.accountant.epsilon`.
        """
        population = len(self.keep_ratios)
        return epsilon(self.noise_multiplier, population, self.per_round, rounds, delta, self.sampling)
