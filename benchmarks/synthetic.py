"""Synthetic(1, 1) on a wireless network, and logistic regressions that many runs train there at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from arrivals import Course
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from sharding import round_time
from sharding.rng import generator
from train.unequal import power_law_sizes

CLIENTS, SAMPLES, FEATURES, CLASSES = 100, 20_509, 60, 10
STEPS, BATCH, LR = 50, 24, 0.1
NEAR = 0.03  # a lognormal draw of the sizes is taken if its total is so near to SAMPLES
TOGETHER = 8  # runs, so that what they train on fits into the cache
Vector = NDArray[np.float64]
Sizes = Literal["zipf", "lognormal"]


@dataclass(frozen=True)
class Samples:
    """Inputs with a column of ones (the bias is the model's last row), and their classes."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class World:
    """Data and network: training samples sorted by client, a tenth of each client's for testing; f_tot = 1.

    Attributes:
        sizes: (N,) training samples of each client.
        compute: (N,) τ.
        communicate: (N,) t.
    """

    seed: int
    train: Samples
    test: Samples
    sizes: NDArray[np.int64]
    compute: Vector
    communicate: Vector

    @property
    def shares(self) -> Vector:
        """p_i, (N,)."""
        return self.sizes / self.sizes.sum()

    def rows(self, client: int) -> slice:
        """Return where a client's training samples are."""
        end = int(self.sizes[: client + 1].sum())
        return slice(end - int(self.sizes[client]), end)


@dataclass
class Run(Course):
    """One training, and what it came to after each round.

    Attributes:
        seed: of the draws and the batches.
        q: (N,) of a draw with replacement, aggregated by Eq. 8; None: K different clients, each with a step size N p_i
            times as large, and the plain mean of their models.
    """

    world: World
    scheme: str
    seed: int
    cohort_size: int
    q: Vector | None
    model: Tensor = field(default_factory=lambda: torch.zeros(FEATURES + 1, CLASSES))
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)

    def draw(self, t: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the different clients of round t, and how often each was drawn."""
        rng = generator(self.world.seed, "invite", self.seed, t, self.cohort_size)
        if self.q is None:
            return np.sort(rng.choice(CLIENTS, self.cohort_size, replace=False)), np.ones(self.cohort_size, np.int64)
        return np.unique(rng.choice(CLIENTS, self.cohort_size, p=self.q / self.q.sum()), return_counts=True)

    @property
    def rounds(self) -> range:
        """All are evaluated."""
        return range(1, len(self.losses) + 1)


def make_world(seed: int, law: Sizes = "zipf") -> World:
    """Draw Synthetic(1, 1) of Li et al. 2020 (FedProx), sizes by this law, and a network.

    `zipf`: in proportion to 1/k. `lognormal`: ⌊lognormal(4, 2)⌋ + 50, as the cited generator has it, drawn until the
    total is about the published one.
    """
    rng = generator(seed, "synthetic")
    sizes = _sizes(law, rng)
    scales = np.sqrt(np.arange(1, FEATURES + 1) ** -1.2)
    parts: dict[str, list[Samples]] = {"train": [], "test": []}
    for size in sizes:
        shift, center = rng.normal(0, 1), rng.normal(0, 1)
        weight, bias = rng.normal(shift, 1, (FEATURES, CLASSES)), rng.normal(shift, 1, CLASSES)
        x = rng.normal(rng.normal(center, 1, FEATURES), scales, (size, FEATURES))
        inputs = torch.from_numpy(np.concatenate([x, np.ones((size, 1))], axis=1)).float()
        targets = torch.from_numpy((x @ weight + bias).argmax(axis=1))
        held_out = size // 10
        parts["test"].append(Samples(inputs[:held_out], targets[:held_out]))
        parts["train"].append(Samples(inputs[held_out:], targets[held_out:]))
    train, test = (
        Samples(torch.cat([part.inputs for part in its]), torch.cat([part.targets for part in its]))
        for its in parts.values()
    )
    kept = np.array([len(part.targets) for part in parts["train"]])
    return World(seed, train, test, kept, *rng.exponential(1, (2, CLIENTS)))


def train_all(
    runs: Sequence[Run], target: float, rounds: int, watch: Callable[[Run, int], None] = lambda run, t: None
) -> Sequence[Run]:
    """Train all runs, each until its training loss is at the target or it has had so many rounds, and return them.

    `watch` is shown each run before each of its rounds.
    """
    for t in range(rounds):
        active = [run for run in runs if not run.losses or run.losses[-1] > target]
        for run in active:
            watch(run, t)
        for first in range(0, len(active), TOGETHER):
            _one_round(active[first : first + TOGETHER], t)
    return runs


def received_norms(run: Run, t: int) -> tuple[NDArray[np.int64], Vector]:
    """Return the clients that round t draws, and the norm of each one's full gradient at the model it receives."""
    clients, _ = run.draw(t)
    norms = []
    for client in clients:
        rows = run.world.rows(client)
        x, y = run.world.train.inputs[rows], run.world.train.targets[rows]
        norms.append(float((x.T @ ((x @ run.model).softmax(-1) - F.one_hot(y, CLASSES)) / len(y)).norm()))
    return clients, np.array(norms)


def _one_round(runs: Sequence[Run], t: int) -> None:
    cohorts = [run.draw(t) for run in runs]
    updates = _train(runs, [clients for clients, _ in cohorts], t).split([len(clients) for clients, _ in cohorts])
    for run, (clients, counts), its in zip(runs, cohorts, updates, strict=True):
        shares = run.world.shares[clients]
        weights = counts / run.cohort_size * (1.0 if run.q is None else shares / (run.q / run.q.sum())[clients])
        run.model = run.model + torch.tensordot(torch.from_numpy(weights).to(its.dtype), its, dims=1)
        times = (np.repeat(column[clients], counts) for column in (run.world.compute, run.world.communicate))
        run.seconds.append(round_time(*times, 1.0) + (run.seconds[-1] if run.seconds else 0.0))
        run.losses.append(float(F.cross_entropy(run.world.train.inputs @ run.model, run.world.train.targets)))
        guesses = (run.world.test.inputs @ run.model).argmax(-1)
        run.accuracies.append(float((guesses == run.world.test.targets).double().mean()))


def _train(runs: Sequence[Run], cohorts: Sequence[NDArray[np.int64]], t: int) -> Tensor:
    """Train every client of every run for STEPS steps; return the updates, one run after the other."""
    inputs, targets, rates, start = [], [], [], []
    for run, clients in zip(runs, cohorts, strict=True):
        scale = np.ones(CLIENTS) if run.q is not None else CLIENTS * run.world.shares
        for client in clients.tolist():
            rows = run.world.rows(client)
            rng = generator(run.world.seed, "batches", run.seed, t, client)
            drawn = torch.from_numpy(rng.integers(rows.start, rows.stop, (STEPS, BATCH)))
            inputs.append(run.world.train.inputs[drawn])
            targets.append(run.world.train.targets[drawn])
            rates.append(LR / (1 + t) * scale[client])
            start.append(run.model)
    before = torch.stack(start)
    model, lr = before.clone(), torch.tensor(rates, dtype=before.dtype)[:, None, None] / BATCH
    x, y = torch.stack(inputs, dim=1), F.one_hot(torch.stack(targets, dim=1), CLASSES).to(before.dtype)
    for step in range(STEPS):
        model -= lr * (x[step].mT @ ((x[step] @ model).softmax(-1) - y[step]))
    return model - before


def _sizes(law: Sizes, rng: np.random.Generator) -> NDArray[np.int64]:
    if law == "zipf":
        return power_law_sizes(SAMPLES, CLIENTS, rng, alpha=1.0)
    while True:
        sizes = rng.lognormal(4, 2, CLIENTS).astype(np.int64) + 50
        if abs(sizes.sum() / SAMPLES - 1) <= NEAR:
            return sizes
