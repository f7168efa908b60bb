"""Pilots of wireless sampling: short runs with uniform and with weighted draws that measure G and β/α.

G_i is the largest ‖U_i‖/η of client i in a uniform pilot, averaged over pilots. The numbers of rounds that the pilots'
mean training loss took to given losses determine β/α (Luo et al. 2024, arXiv 2404.13804, Section 5.3.1 and Eq. 35).
Pilots start from the run's own model, with its data and network. Their draws and batches are their own, the same for
all runs of one `data_seed`. The result is kept in `pilots.json`, for a resumed run, or for another run of the same
`data_seed` into whose directory it is copied.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from math import isnan, nan
from pathlib import Path
from statistics import fmean

import numpy as np
from pydantic.dataclasses import dataclass as checked

from sharding.client_sampling import Participation, StatisticalSampler, WirelessSampler, estimate_beta_over_alpha
from sharding.client_sampling.base import Client, Population
from sharding.errors import UserError
from sharding.rng import seed_of
from sharding.validation import Vector
from train.assembly import make_server
from train.callbacks import Callback, FinishedRound
from train.callbacks.stopping import DivergedError, LostRounds
from train.engines.local import evaluate
from train.experiment import Experiment
from train.rounds import run_rounds
from train.rundir.files import PILOTS_FILE
from train.runtime.files import write_whole
from train.runtime.jsonl import read_record
from train.runtime.stages import enter

PILOTS = 3  # of each kind
FURTHER = 0.9  # a pilot ends at this multiple of the least loss, so that the mean of all pilots reaches the least
LAWS = ("uniform", "weighted")


@checked(frozen=True)
class Lesson:
    """The result of the pilots.

    Attributes:
        beta_over_alpha: the mean of `estimates`; 0 if all contradict the bound.
        gradient_norms: (N,) G; a client that no uniform pilot drew has the mean of the others.
        rounds: by kind of pilot, the rounds of the mean loss to each level; None if it was not reached.
        estimates: β/α by level; None if one kind did not reach the level, or the two contradict the bound.
    """

    beta_over_alpha: float
    gradient_norms: list[float]
    rounds: dict[str, list[int | None]]
    estimates: list[float | None]


class Pilot(StatisticalSampler):
    """Draws with a given law, and keeps the largest norm of each client."""

    name = "pilot"

    def __init__(self, law: Vector, seed: int, per_round: int, population: Population) -> None:
        super().__init__(law.size, per_round, seed, population)
        self._law, self.largest = law, np.full(law.size, np.nan)

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Select every client that was drawn."""
        for client, norm in norms.items():
            if np.isfinite(norm):
                self.largest[int(client)] = np.fmax(self.largest[int(client)], norm)
        return super().select(round, cohort, norms)

    def probabilities(self) -> Vector:
        """Return the law, (N,)."""
        return self._law


def teach(experiment: Experiment, directory: Path) -> None:
    """Set the sampler's G and β/α from pilots, if configured; run the pilots unless their result exists.

    Raises:
        UserError: the result cannot be read, or has another number of clients.
    """
    clients = experiment.config.clients
    if not (clients.pilot_losses and isinstance(experiment.sampler, StatisticalSampler)):
        return
    path = directory / PILOTS_FILE
    if not path.exists():
        write_whole(path, (json.dumps(learn(experiment).__dict__) + "\n").encode())
    lesson, wanted = read_record(path, lambda held: Lesson(**held)), experiment.sampler.num_clients
    if (count := len(lesson.gradient_norms)) != wanted:
        raise UserError(f"{path} is of {count} clients, not {wanted}; delete it to run the pilots again")
    experiment.sampler.learn(np.array(lesson.gradient_norms))
    if isinstance(experiment.sampler, WirelessSampler) and experiment.sampler.beta_over_alpha is None:
        experiment.sampler.beta_over_alpha = lesson.beta_over_alpha


def learn(experiment: Experiment) -> Lesson:
    """Run the pilots."""
    population, levels = experiment.sampler.population, experiment.config.clients.pilot_losses
    shares = population.num_samples / population.num_samples.sum()
    laws = dict(zip(LAWS, (np.full(shares.size, 1 / shares.size), shares), strict=True))
    flown = {kind: [fly(experiment, law, kind, number) for number in range(PILOTS)] for kind, law in laws.items()}
    largest = [pilot.largest for pilot, _ in flown["uniform"]]
    curves = {kind: [losses for _, losses in its] for kind, its in flown.items()}
    return conclude(shares, largest, curves, levels, experiment.sampler.per_round)


def fly(experiment: Experiment, law: Vector, kind: str, number: int) -> tuple[Pilot, list[float]]:
    """Run one pilot to a little below the least loss; return it and its training loss after each round."""
    enter(f"running {(which := f'pilot {number + 1} of {PILOTS} with {kind} draws')}")
    config, seed = experiment.config, seed_of(experiment.config.seed_of_data, "pilot", kind, number)
    pilot = Pilot(law, seed, experiment.sampler.per_round, experiment.sampler.population)
    losses: list[float] = []

    class Land(Callback):
        def after_round(self, done: FinishedRound) -> None:
            losses.append(evaluate(parts.model, parts.dataset, parts.training)[1])
            done.last |= losses[-1] <= FURTHER * min(config.clients.pilot_losses)

    own = config.model_copy(update={"evaluate_every": config.rounds, "alignment": False})
    job = replace(experiment.job, seed=seed)
    server = make_server(own, deepcopy(experiment.model), experiment.server.planner)
    parts = replace(experiment, config=own, server=server, sampler=pilot, job=job)
    try:
        run_rounds(parts, 0, [Land(), LostRounds(config.rounds, which)])
    except DivergedError as error:
        raise DivergedError(
            f"no client's update could be used in {which}: lower local.optimizer.lr or local.clip"
        ) from error
    finally:
        parts.close()
    return pilot, losses


def conclude(
    shares: Vector,
    largest: Sequence[Vector],
    curves: Mapping[str, Sequence[Sequence[float]]],
    levels: Sequence[float],
    cohort_size: int,
) -> Lesson:
    """Return the result of the pilots.

    Args:
        shares: (N,) p, summing to 1.
        largest: by uniform pilot, the largest norms, (N,), NaN for clients that it did not draw.
        curves: by kind, the training losses of each pilot after each round.
        levels: losses at which the two kinds are compared.
        cohort_size: K.
    """
    norms = mean_norms(largest)
    rounds = {kind: [rounds_to(level, its) for level in levels] for kind, its in curves.items()}
    uniform, weighted = ([nan if r is None else r for r in rounds[kind]] for kind in LAWS)
    beta_over_alpha, each = estimate_beta_over_alpha(shares, norms, uniform, weighted, cohort_size)
    estimates = [None if isnan(value) else value for value in each.tolist()]
    return Lesson(beta_over_alpha, norms.tolist(), rounds, estimates)


def mean_norms(largest: Sequence[Vector]) -> Vector:
    """Return the mean of the pilots' largest norms, (N,)."""
    seen = np.stack(largest)
    counts = np.isfinite(seen).sum(axis=0)
    means = np.nansum(seen, axis=0) / np.maximum(counts, 1)
    return np.where(counts > 0, means, means[counts > 0].mean())


def rounds_to(level: float, curves: Sequence[Sequence[float]]) -> int | None:
    """Return the rounds that the mean loss took to a level; a pilot that has ended counts with its last loss."""
    means = (fmean(its[min(t, len(its) - 1)] for its in curves) for t in range(max(map(len, curves))))
    return next((t + 1 for t, mean in enumerate(means) if mean <= level), None)
