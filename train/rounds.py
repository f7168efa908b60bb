"""The algorithm: invite a cohort, plan its shards, train, select updates, average, step, evaluate, call back."""

from collections.abc import Sequence

from torch import Tensor

from sharding.plan import Client
from train.callbacks import Callback
from train.clock import Clock
from train.evaluation import scores
from train.experiment import Experiment
from train.fedavg_reference import FedAvgStep
from train.history import History
from train.metrics import RoundMetrics


def run_rounds(
    experiment: Experiment, start: int = 0, callbacks: Sequence[Callback] = (), history: History | None = None
) -> RoundMetrics | None:
    """Run the rounds from `start`, until the last one or until the history or a callback ends the run.

    Args:
        experiment: whose models are trained.
        start: the first round, from 0.
        callbacks: all are called after each round.
        history: of the rounds before `start`.

    Returns:
        The metrics of the last round; None if there was none to run.
    """
    config, tasks, sampler = experiment.config, experiment.tasks, experiment.sampler
    history, metrics = history or History(config), None
    for t in range(start, config.rounds):
        clock, measured = Clock(), dict[str, RoundMetrics]()

        cohorts = experiment.invite(t)  # clients by model; most runs train one model

        with clock("plan"):
            plans = {name: task.plan(cohorts[name], t) for name, task in tasks.items()}

        with clock("train"):
            if sampler.needs_norms:  # clients keep their updates until the server has selected by the norms
                reports = {name: tasks[name].engine.report(plan, t, tasks[name].lr(t)) for name, plan in plans.items()}
                norms = {name: report.norms for name, report in reports.items()}
                selected = experiment.select(t, plans, norms)
                replies = {name: report.collect(selected[name].weights) for name, report in reports.items()}
            else:  # updates are averaged as they arrive
                selected = experiment.select(t, plans, {})
                replies = {name: tasks[name].engine.train(plan, t, tasks[name].lr(t)) for name, plan in plans.items()}

        for name, task in tasks.items():
            plan, selection, server = plans[name], selected[name], task.server
            evaluates, losses = config.evaluates(t), dict[Client, Tensor]()
            fedavg = FedAvgStep(task, cohorts[name], t) if config.alignment and evaluates else None

            with clock("train"):
                average = server.average(plan, selection.weights, selection.total)
                for client, reply in replies[name]:
                    average.add(client, reply.failure or reply.update)
                    if reply.loss is not None:
                        losses[client] = reply.loss

            with clock("aggregate"):
                aggregation = server.step(average)

            profiles = sampler.population.profiles
            metrics = task.measure(t, plan, selection, aggregation, losses, profiles)
            metrics.lr = task.lr(t)
            if fedavg is not None:
                metrics.alignment = fedavg.cosine(server.model)
            if evaluates:
                with clock("evaluate"):
                    scores(task, metrics)
            measured[name] = metrics

        metrics = experiment.summarize(measured)
        clock.write_to(metrics)
        history.complete(metrics)
        stops = [callback.after_round(metrics, plans) for callback in callbacks]
        if metrics.stopped or any(stops):
            break
    return metrics
