"""What strong clients' capacity is worth when weak clients hold fewer terms: changes of a round, one at a time.

Some clients afford the weakest keep ratio and some the strongest. The terms that only the strong ones train are the
tail. Each change is tried against `top_n` in trials of a quarter of the rounds, each at its best rate. The plan of
these runs, with their rules, is in docs/results/uneven_plan.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import pandas as pd
import torch
from torch import Tensor, nn

from sharding import Plan, Shard, ShardPlanner, factorize, merge
from sharding.layers import FactorizedLayer
from sharding.plan import Client
from sharding.rng import generator
from sharding.shard import Terms
from studies.curves import evaluations
from train.assembly import assemble
from train.config.schema import Config
from train.engines import Job
from train.engines.engine import Updates
from train.engines.sequential import SequentialEngine
from train.experiment import Experiment, Task
from train.frame import round_frame
from train.run import run
from train.rundir.file_names import CONFIG_FILE, METRICS_FILE
from train.utils.jsonl import read_lines


@dataclass(frozen=True)
class Change:
    """What is other than in `top_n`.

    Attributes:
        by_holders: the tail moves by the share of the cohort's samples that strong clients have.
        nested: in half of its steps, at random, a strong client trains the weakest rank alone.
        tail_step: factor of the tail's gradients.
        growth: the share of the rounds in which all clients train the weakest rank.
        weakest_start: the start has the weakest client's rank instead of the strongest's.
    """

    by_holders: bool = False
    nested: bool = False
    tail_step: float = 1.0
    growth: float = 0.0
    weakest_start: bool = False


class ChangedEngine(SequentialEngine):
    """Trains the clients of two keep ratios with a change."""

    def __init__(self, job: Job, change: Change, keep_ratios: Mapping[Client, float]) -> None:
        super().__init__(job)
        self.change, self.weakest, self.strongest = change, min(keep_ratios.values()), max(keep_ratios.values())
        layers = ShardPlanner("top_n").template(job.model, self.weakest).terms
        self.num_weakest = {name: terms.indices.numel() for name, terms in layers.items()}

    def train(self, plan: Plan, round: int, lr: float) -> Updates:
        """Yield the clients' updates."""
        samples = {client: len(self.job.clients[client]) for client in plan}
        share = sum(samples[client] for client in plan.groups.get(self.strongest, ())) / sum(samples.values())
        for client, shard in plan.shards():
            self._rng = generator(self.job.seed, "nested", round, client)
            update = self.train_client(client, shard, round, lr)
            if update.shard is not None and self.change.by_holders and shard.keep_ratio == self.strongest:
                update = replace(update, shard=self._shrunk(update.shard, shard, share))
            yield client, update

    def resident(self, shard: Shard) -> nn.Module:
        """Return the model that trains a shard."""
        is_new = shard.keep_ratio not in self._residents
        model = super().resident(shard)
        if is_new and shard.keep_ratio == self.strongest:
            self._change_training(model)
        return model

    def _change_training(self, model: nn.Module) -> None:
        """Let the tail of a strong client's model train as the change has it."""
        parts = dict(model.named_modules())
        layers = [(part, n) for name, n in self.num_weakest.items() if isinstance(part := parts[name], FactorizedLayer)]
        for layer, n in layers:
            scale = torch.ones(layer.num_terms)
            scale[n:] = self.change.tail_step
            for side in (layer.u, layer.v):
                side.register_hook(partial(torch.mul, scale))

        def draw_rank(module: nn.Module, _: object) -> None:
            if module.training:
                whole = float(self._rng.random() < 0.5)
                for layer, n in layers:
                    layer.multipliers[n:] = whole

        if self.change.nested:
            model.register_forward_pre_hook(draw_rank)

    def _shrunk(self, update: Shard, sent: Shard, share: float) -> Shard:
        """Return the update with this share of the tail's changes."""

        def shrink(new: Tensor, old: Tensor, n: int) -> Tensor:
            return torch.cat([new[:, :n], old[:, n:].lerp(new[:, n:], share)], dim=1)

        terms: dict[str, Terms] = {}
        for name, new in update.terms.items():
            old, n = sent.terms[name], self.num_weakest[name]
            terms[name] = replace(new, u=shrink(new.u, old.u, n), v=shrink(new.v, old.v, n))
        return replace(update, terms=terms)


class GrowingTask(Task):
    """A task whose clients train the weakest rank for a share of the rounds, and then each its own."""

    growth = 0.0

    def plan(self, cohort: Sequence[Client], t: int) -> Plan:
        """Plan the shards of these clients for round t."""
        if t >= self.growth * self.config.rounds:
            return super().plan(cohort, t)
        return self.server.plan(dict.fromkeys(cohort, min(self.keep_ratios.values())), t)


def build(change: Change, config: Config) -> Experiment:
    """Build a run with a change."""
    experiment = assemble(config)
    (task,) = experiment.tasks.values()
    changed = GrowingTask(**{each.name: getattr(task, each.name) for each in fields(task)})
    changed.growth = change.growth
    changed.make_engine = partial(ChangedEngine, change=change, keep_ratios=task.keep_ratios)
    if change.weakest_start:
        start = merge(factorize(task.server.model, min(task.keep_ratios.values()))).state_dict()
        for model in {task.server.model, task.server.result}:
            model.load_state_dict(start)
    return Experiment(config, {config.name: changed}, experiment.sampler)


def run_all(change: Change, configs: Mapping[str, Config], *_: object) -> pd.DataFrame:
    """Run what is missing with a change, one run at a time, and return the curves of all runs."""
    for config in configs.values():
        run(config, resume=(config.directory / CONFIG_FILE).exists(), build=partial(build, change))
    return evaluations(
        round_frame({name: read_lines(config.directory / METRICS_FILE) for name, config in configs.items()})
    )
