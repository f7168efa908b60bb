"""The algorithm: invite a cohort, plan its shards, train, select updates, average, evaluate, call the callbacks."""

from collections.abc import Sequence

from sharding.planner import Client
from train.callbacks import Callback, FinishedRound
from train.engines import Receipt
from train.experiment import Experiment, Metrics, Work
from train.metrics import FedAvgStep, measure, scores
from train.multi_model import MultiModel
from train.runtime.clock import Clock


def run_rounds(
    experiment: Experiment | MultiModel, start: int, callbacks: Sequence[Callback] = ()
) -> FinishedRound | None:
    """Run the rounds `start` … `config.rounds` − 1, or until a callback ends the run; return the last one."""
    config, done = experiment.config, None
    for t in range(start, config.rounds):
        clock, cohort = Clock(), experiment.sampler.cohort(t)
        work = experiment.begin(cohort, t, clock)  # plan, train and select, for each model by its name
        found = {name: finish(experiment.parts[name], its, t, clock) for name, its in work.items()}
        metrics = experiment.summarize(found, len(cohort))
        plans = {name: its.plan for name, its in work.items()}
        done = FinishedRound(t, {"round": t} | metrics | clock.seconds(), plans, last=t == config.rounds - 1)
        for callback in callbacks:
            callback.after_round(done)
        if done.last or done.interrupted:
            break
    return done


def finish(experiment: Experiment, work: Work, t: int, clock: Clock) -> Metrics:
    """Average the updates of one model, take the server's step, and evaluate where the round is evaluated."""
    server, evaluates = experiment.server, experiment.config.evaluates(t)
    fedavg = FedAvgStep(experiment, list(work.plan), t) if experiment.config.alignment and evaluates else None
    receipts: dict[Client, Receipt] = {}
    with clock("train"):
        average = server.average(work.plan, work.chosen.weights)
        for client, update in work.updates:
            average.add(client, update.failure or update.shard)
            nbytes = 0 if update.shard is None else update.shard.nbytes
            receipts[client] = Receipt(update.loss, update.failure, nbytes)
    with clock("aggregate"):
        outcome = server.step(average, work.chosen.total)
    metrics = {"lr": experiment.step_size(t)} | measure(experiment, work, receipts, outcome)
    if fedavg is not None:
        metrics["alignment"] = fedavg.cosine(server.model)
    if evaluates:
        with clock("evaluate"):
            metrics |= scores(experiment)
    return metrics
