"""The account of a run with differential privacy: what it has released, the ε that it promises, and when it must end.

The ε of a run is that of all the rounds that it is configured to release. It holds however the run ends: an earlier
end, as by a target or by hand, only leaves out a part of what the proof composes. ε of the rounds so far would not hold
where they ended because of what they had shown.
"""

import logging
from collections.abc import Callable, Iterable

from sharding.rounds.privacy.accountant import Sampling, epsilon, rounds_within
from train.config.schema import Config
from train.utils.errors import RunError

log = logging.getLogger(__name__)

Release = tuple[int, str]  # a round, and the name of what it released: `sharding.rounds.aggregation.aggregate.Outcome`


def spent_epsilon(config: Config, rounds: int) -> float:
    """Return ε at the configured δ after these rounds of a run with privacy."""
    assert config.privacy is not None
    privacy, clients = config.privacy, config.clients
    return epsilon(
        privacy.noise_multiplier, clients.count, clients.per_round, rounds, privacy.delta, sampling_of(config)
    )


def sampling_of(config: Config) -> Sampling:
    """Return how the clients of a run with privacy are drawn, in the words of the account."""
    return "poisson" if config.clients.sampler.name == "poisson" else "fixed"


class Account:
    """The releases of a run with privacy. A round that runs again is another one only if it releases other numbers.

    Args:
        config: The run's configuration.
        releases: The releases of earlier processes.
        keep: A function that is called with each new release, before its model leaves the server.

    Attributes:
        releases: All releases so far.
    """

    def __init__(
        self, config: Config, releases: Iterable[Release] = (), keep: Callable[[Release], object] = lambda _: None
    ) -> None:
        self._config, self._keep = config, keep
        self._names: dict[int, set[str]] = {}
        self.releases = sorted(set(releases))
        for round, name in self.releases:
            self._names.setdefault(round, set()).add(name)

    @property
    def epsilon(self) -> float:
        """ε at the configured δ of all rounds that may be released, and of those that were released again."""
        return spent_epsilon(self._config, self._most())

    def add(self, round: int, name: str) -> None:
        """Note a release; raise a RunError if it would spend more than `privacy.max_epsilon`."""
        names = self._names.setdefault(round, set())
        if name in names:
            return
        if names:
            log.warning("round %d runs again with another result, and is one more release in the account of ε", round)
        names.add(name)
        self.releases.append((round, name))
        if len(self.releases) > self._most():
            assert self._config.privacy is not None
            raise RunError(
                f"round {round} runs again with another result, and one more release would spend more than "
                f"privacy.max_epsilon={self._config.privacy.max_epsilon}; resume the run where it was started"
            )
        self._keep((round, name))

    def ends_with(self, round: int) -> bool:
        """Return whether `privacy.max_epsilon` allows no release after this round."""
        names = self._names.get(round, set())
        count = len(self.releases) + (not names)
        is_repeated = round + 1 in self._names and len(names) == 1  # then the next round may be the same again, too
        return self._most() < self._planned() and count >= self._most() and not is_repeated

    def _planned(self) -> int:
        return self._config.rounds + len(self.releases) - len(self._names)

    def _most(self) -> int:
        """Return how many releases `privacy.max_epsilon` allows, of those that are planned."""
        privacy, clients, planned = self._config.privacy, self._config.clients, self._planned()
        assert privacy is not None
        if privacy.max_epsilon is None:
            return planned
        settings = (privacy.noise_multiplier, clients.count, clients.per_round, planned, privacy.delta)
        return rounds_within(privacy.max_epsilon, *settings, sampling_of(self._config))
