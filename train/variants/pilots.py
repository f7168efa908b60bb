"""Pilots of wireless sampling: short runs with uniform and with weighted draws that measure G and β/α.

G_i is the largest ‖U_i‖/η of client i in a uniform pilot, averaged over pilots. The numbers of rounds that the pilots'
mean training loss took to given losses determine β/α (Luo et al. 2024, arXiv 2404.13804, Section 5.3.1 and Eq. 35).
Pilots start from the run's own model, with its data and network. Their draws of clients and terms and their batches are
their own, the same for all runs of one `data_seed`. The result is kept in `pilots.json`, for a resumed run, or for
another run of the same `data_seed` into whose directory it is copied.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from math import isnan, nan
from statistics import fmean

import numpy as np
from pydantic.dataclasses import dataclass as checked

from sharding.client_sampling import Participation, StatisticalSampler, WirelessSampler, estimate_beta_over_alpha
from sharding.client_sampling.sampler import Population
from sharding.errors import UserError
from sharding.rng import seed_of
from sharding.rounds.plan import Client
from sharding.validation import Vector
from train.callbacks import Callback, Plans
from train.callbacks.stopping import DivergedError, Interruption, LostRounds
from train.experiment.assembly import make_planner, make_server
from train.experiment.evaluation import evaluate
from train.experiment.experiment import Experiment
from train.experiment.metrics import RoundMetrics
from train.rounds import run_rounds
from train.rundir.file_names import PILOTS_FILE
from train.utils.files import write_atomically
from train.utils.jsonl import read_record
from train.utils.signals import StopRequest
from train.utils.stages import set_stage

PILOTS = 3  # of each kind
FURTHER = 0.9  # a pilot ends at this multiple of the least loss, so that the mean of all pilots reaches the least
DISTRIBUTIONS = ("uniform", "weighted")


@checked(frozen=True)
class Calibration:
    """The result of the pilots.

    Attributes:
        beta_over_alpha: the mean of `estimates`; 0 if all contradict the bound.
        gradient_norms: (N,) G; a client that no uniform pilot drew has the mean of the others.
        rounds: the rounds of the mean loss to each level, by kind of pilot; None if it was not reached.
        estimates: β/α by level; None if one kind did not reach the level, or the two contradict the bound.
    """

    beta_over_alpha: float
    gradient_norms: list[float]
    rounds: dict[str, list[int | None]]
    estimates: list[float | None]


class Pilot(StatisticalSampler):
    """Draws with a given distribution, and keeps the largest norm of each client."""

    name = "pilot"

    def __init__(self, distribution: Vector, seed: int, per_round: int, population: Population) -> None:
        super().__init__(distribution.size, per_round, seed, population)
        self._distribution, self.largest = distribution, np.full(distribution.size, np.nan)

    def select(self, round: int, cohort: list[int], norms: Mapping[Client, float]) -> Participation:
        """Select every client that was drawn."""
        for client, norm in norms.items():
            if np.isfinite(norm):
                self.largest[int(client)] = np.fmax(self.largest[int(client)], norm)
        return super().select(round, cohort, norms)

    def probabilities(self) -> Vector:
        """Return the distribution, (N,)."""
        return self._distribution


class RunPilots(Callback):
    """Runs the pilots before training, unless their result exists, and sets the sampler's G and β/α.

    Args:
        request: ends the pilots, whose result is then not kept.
    """

    def __init__(self, request: StopRequest) -> None:
        self._request = request

    def before_training(self, experiment: Experiment) -> None:
        """Calibrate the sampler; raise a UserError if the result cannot be read, or has another number of clients."""
        sampler = experiment.sampler
        assert isinstance(sampler, StatisticalSampler)  # the configuration is checked
        path = experiment.config.directory / PILOTS_FILE
        if not path.exists():
            measured = calibrate(experiment, self._request)
            write_atomically(path, (json.dumps(measured.__dict__) + "\n").encode())
        calibration = read_record(path, lambda record: Calibration(**record))
        if (count := len(calibration.gradient_norms)) != sampler.num_clients:
            raise UserError(f"{path} is of {count} clients, not {sampler.num_clients}; delete it to run pilots again")
        sampler.learn(np.array(calibration.gradient_norms))
        if isinstance(sampler, WirelessSampler) and sampler.beta_over_alpha is None:
            sampler.beta_over_alpha = calibration.beta_over_alpha


def calibrate(experiment: Experiment, request: StopRequest) -> Calibration:
    """Run the pilots, and return what they measured; raise `Stopped` if a signal asked to stop."""
    sampler, levels = experiment.sampler, experiment.config.clients.pilot_losses
    shares = sampler.population.num_samples / sampler.population.num_samples.sum()
    distributions = dict(zip(DISTRIBUTIONS, (np.full(shares.size, 1 / shares.size), shares), strict=True))
    pilots = {
        kind: [run_pilot(experiment, distribution, kind, number, request) for number in range(PILOTS)]
        for kind, distribution in distributions.items()
    }
    largest = [pilot.largest for pilot, _ in pilots["uniform"]]
    curves = {kind: [losses for _, losses in runs] for kind, runs in pilots.items()}
    return fit(shares, largest, curves, levels, sampler.per_round)


def run_pilot(
    experiment: Experiment, distribution: Vector, kind: str, number: int, request: StopRequest
) -> tuple[Pilot, list[float]]:
    """Run one pilot to a little below the least loss; return it and its training loss after each round.

    Raise `Stopped` if a signal asked to stop, a DivergedError if no client's update could be used.
    """
    which = f"pilot {number + 1} of {PILOTS} with {kind} draws"
    set_stage(f"running {which}")
    config, seed = experiment.config, seed_of(experiment.config.seed_of_data, "pilot", kind, number)
    pilot = Pilot(distribution, seed, experiment.sampler.per_round, experiment.sampler.population)
    losses: list[float] = []

    class StopAtLoss(Callback):
        def after_round(self, metrics: RoundMetrics, plan: Plans) -> bool:
            losses.append(evaluate(copy.model, copy.dataset, copy.clients.data.all())[1])
            return losses[-1] <= FURTHER * min(config.clients.pilot_losses)

    changed = config.model_copy(update={"evaluate_every": config.rounds, "alignment": False})
    planner = make_planner(config.model_copy(update={"seed": seed}))
    server = make_server(changed, deepcopy(experiment.model), planner)
    job = replace(experiment.job, seed=seed)
    copy = replace(experiment, config=changed, server=server, sampler=pilot, job=job, with_residual=set())
    lost = LostRounds(config.rounds, which)
    copy.start()
    try:
        run_rounds(copy, 0, [StopAtLoss(), lost, Interruption(request)])
        request.raise_if_set()
        lost.close()
    finally:
        copy.close()
    if lost.diverged:
        raise DivergedError(f"no client's update could be used in {which}: {lost.reason}")
    return pilot, losses


def fit(
    shares: Vector,
    largest: Sequence[Vector],
    curves: Mapping[str, Sequence[Sequence[float]]],
    levels: Sequence[float],
    cohort_size: int,
) -> Calibration:
    """Return what the pilots measured, for the clients' shares p, (N,), and a cohort of K.

    The largest norms are (N,) by uniform pilot, NaN for clients that it did not draw; the curves are each pilot's
    training losses, by kind, which are compared at these levels.
    """
    norms = mean_norms(largest)
    rounds = {kind: [rounds_to(level, runs) for level in levels] for kind, runs in curves.items()}
    uniform, weighted = ([nan if r is None else r for r in rounds[kind]] for kind in DISTRIBUTIONS)
    beta_over_alpha, each = estimate_beta_over_alpha(shares, norms, uniform, weighted, cohort_size)
    estimates = [None if isnan(value) else value for value in each.tolist()]
    return Calibration(beta_over_alpha, norms.tolist(), rounds, estimates)


def mean_norms(largest: Sequence[Vector]) -> Vector:
    """Return the mean of the pilots' largest norms, (N,)."""
    seen = np.stack(largest)
    counts = np.isfinite(seen).sum(axis=0)
    means = np.nansum(seen, axis=0) / np.maximum(counts, 1)
    return np.where(counts > 0, means, means[counts > 0].mean())


def rounds_to(level: float, curves: Sequence[Sequence[float]]) -> int | None:
    """Return the rounds that the mean loss took to a level; a pilot that has ended counts with its last loss."""
    means = (fmean(curve[min(t, len(curve) - 1)] for curve in curves) for t in range(max(map(len, curves))))
    return next((t + 1 for t, mean in enumerate(means) if mean <= level), None)
