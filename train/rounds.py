"""The algorithm: invite a cohort, plan its shards, train, average, step, measure, evaluate, call back."""

from collections.abc import Sequence

from torch import Tensor

from sharding import Plan
from sharding.client_sampling import Participation
from sharding.rounds.aggregation.aggregate import Average
from sharding.rounds.plan import Client
from train.callbacks import Callback
from train.engines.engine import Replies
from train.engines.two_stage import train_selected
from train.experiment.clock import Clock
from train.experiment.evaluation import scores
from train.experiment.experiment import Experiment
from train.experiment.fedavg_reference import FedAvgStep
from train.experiment.history import History
from train.experiment.metrics import RoundMetrics, measure


def run_rounds(
    experiment: Experiment, start: int = 0, callbacks: Sequence[Callback] = (), history: History | None = None
) -> RoundMetrics | None:
    """Run the rounds of a started experiment until the last, or until the history or a callback ends the run.

    The history has the rounds before `start`, counted from 0. Return the metrics of the last round; None without one.
    """
    config, server, sampler = experiment.config, experiment.server, experiment.sampler
    history, metrics = history or History(config), None
    for t in range(start, config.rounds):
        clock, evaluates = Clock(), history.evaluates(t)
        cohort = sampler.cohort(t)

        with clock("plan"):
            plan = experiment.plan(cohort, t)

        fedavg = FedAvgStep(experiment, cohort, t) if config.alignment and evaluates else None

        with clock("train"):  # most updates are trained when they are collected
            selection, replies = train_selected(experiment.engine, sampler, plan, t, experiment.lr(t))
            average, losses = collect(experiment, plan, selection, replies)

        with clock("aggregate"):
            outcome = server.step(average)

        metrics = measure(experiment, t, plan, selection, outcome, losses)
        experiment.with_residual.update(metrics.new_clients or ())
        if fedavg is not None:
            metrics |= {"alignment": fedavg.cosine(server.model)}
        if evaluates:
            with clock("evaluate"):
                metrics |= scores(experiment)
        if server.privacy is None:  # seconds tell how many clients took part
            metrics |= clock.seconds()
        metrics |= history.complete(metrics, outcome.release)

        stops = [callback.after_round(metrics, plan) for callback in callbacks]
        if metrics.stopped or any(stops):
            break
    return metrics


def collect(
    experiment: Experiment, plan: Plan, selection: Participation, replies: Replies
) -> tuple[Average, dict[Client, Tensor]]:
    """Average the updates as they arrive; return the average, and the loss of each client that has one."""
    weights = () if experiment.server.privacy else (selection.weights, selection.total)  # with it all count alike
    average, losses = experiment.server.average(plan, *weights), dict[Client, Tensor]()
    for client, reply in replies:
        average.add(client, reply.failure or reply.update)
        if reply.loss is not None:
            losses[client] = reply.loss
    return average, losses
