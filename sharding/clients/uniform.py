"""The plain samplers: some clients at random, without replacement, or all of them."""

from sharding.errors import UserError
from sharding.rng import generator


class UniformSampler:
    """Invites `per_round` of `num_clients` clients, every set equally likely, independently each round.

    Raises:
        UserError: per_round is not in 1…num_clients.
    """

    def __init__(self, num_clients: int, per_round: int, seed: int) -> None:
        if not 1 <= per_round <= num_clients:
            raise UserError(
                f"clients.per_round is {per_round}, but there are {num_clients} clients; choose 1 to {num_clients}"
            )
        self.num_clients = num_clients
        self.per_round = per_round
        self.seed = seed

    def invite(self, round: int) -> list[int]:
        """Return the round's cohort, ascending."""
        rng = generator(self.seed, "invite", round)
        return sorted(rng.choice(self.num_clients, self.per_round, replace=False).tolist())


class FullSampler(UniformSampler):
    """Invites every client every round; `per_round` says how many there are, or is an error.

    Raises:
        UserError: per_round is not num_clients.
    """

    def __init__(self, num_clients: int, per_round: int, seed: int) -> None:
        if per_round != num_clients:
            raise UserError(
                f"clients.sampler=full invites all {num_clients} clients; set clients.per_round={num_clients}"
            )
        super().__init__(num_clients, per_round, seed)
