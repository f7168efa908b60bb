"""The workload's arithmetic alone: a plain loop over half of the cohort in each of two processes, with no federation.

No simulator that trains by torch can be faster. Nothing is sent or averaged. Run by benchmarks/peers.py.
"""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from workload import COHORT, ROUNDS, Stopwatch, network, no_arguments, train, user_data

WORKERS = 2


def train_clients(users: list[int]) -> None:
    """Train a new network for each of these users."""
    torch.set_num_threads(1)
    for user in users:
        train(network(), *user_data(user))


def main() -> None:
    watch, cohort = Stopwatch(), list(range(COHORT))
    with ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
        for _ in range(ROUNDS + 1):
            list(pool.map(train_clients, [cohort[index::WORKERS] for index in range(WORKERS)]))
            watch.lap()
    watch.report()


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
