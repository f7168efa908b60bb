"""What a run with differential privacy spends: ε after its rounds, and how many of them its budget allows."""

from sharding.rounds.privacy.accountant import Sampling, epsilon, rounds_within
from train.config.schema import Config


def spent_epsilon(config: Config, rounds: int) -> float:
    """Return ε at the configured δ after these rounds of a run with privacy."""
    assert config.privacy is not None
    privacy, clients = config.privacy, config.clients
    return epsilon(
        privacy.noise_multiplier, clients.count, clients.per_round, rounds, privacy.delta, sampling_of(config)
    )


def rounds_of_budget(config: Config) -> int:
    """Return how many of a run's rounds `privacy.max_epsilon` allows; all without one."""
    privacy, clients = config.privacy, config.clients
    if privacy is None or privacy.max_epsilon is None:
        return config.rounds
    return rounds_within(
        privacy.max_epsilon,
        *(privacy.noise_multiplier, clients.count, clients.per_round, config.rounds, privacy.delta),
        sampling_of(config),
    )


def sampling_of(config: Config) -> Sampling:
    """Return how the clients of a run with privacy are drawn, in the words of the account."""
    return "poisson" if config.clients.sampler.name == "poisson" else "fixed"
