"""The training of G clients of one keep ratio as one model: what `train.local` does, on a client axis.

On a GPU batches stay on the device, and no step waits for the host. That has never been run: there was no GPU.
"""

from collections.abc import Sequence
from math import inf

import numpy as np
import torch
from torch import Tensor, nn

from sharding import Shard
from sharding.optim import clip_factors, decay_multipliers, scale_factors
from train.dropout import key_dropout, sample_seeds
from train.engines.base import Job
from train.engines.folding import FoldedFactorizedConv2d, FoldedFactorizedLinear, fold
from train.layout import channels_last
from train.local import ClientData, draw_passes, largest_batch, mixed_precision, num_steps, passes
from train.parts import cross_entropy
from train.sections import LocalConfig

Key = tuple[int | str, ...]


class Profile:
    """A resident model of G clients.

    Args:
        resident: the model of one client, factorized for their keep ratio.
        num_clients: G.
        job: what there is to train.

    Raises:
        NotFoldableError: the model has a part that cannot be folded.
    """

    def __init__(self, resident: nn.Module, num_clients: int, job: Job) -> None:
        self.job, self.num_clients = job, num_clients
        self.model, self.state = fold(resident, num_clients, job.choices)
        self.model.train()
        self.masks = key_dropout(self.model)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        kinds = FoldedFactorizedLinear | FoldedFactorizedConv2d
        self.layers = [part for part in self.model.modules() if isinstance(part, kinds) and part.u.requires_grad]

    @torch.no_grad()
    def load(self, shards: Sequence[Shard]) -> None:
        """Copy the shards of G clients in."""
        states = [shard.state() for shard in shards]
        for name, tensor in states[0].items():
            alike = all(state[name] is tensor for state in states)
            self.state[name].copy_(tensor if alike else torch.stack([state[name] for state in states]))

    @torch.no_grad()
    def read(self, shards: Sequence[Shard]) -> list[Shard]:
        """Return what training made of these shards."""
        parts = {name: self.state[name].detach().clone().unbind() for name in shards[0].trained()}
        return [
            shard.returned({name: tensors[place] for name, tensors in parts.items()})
            for place, shard in enumerate(shards)
        ]

    def train(self, clients: Sequence[ClientData], keys: Sequence[Key], lr: float) -> Tensor:
        """Train every client on its own data, in place, and return the mean cross-entropies of their steps, (G,).

        Args:
            clients: their samples; those who take the most steps come first.
            keys: (seed, round, client) of each.
            lr: of this round.
        """
        job, batches = self.job, Batches(clients, keys, self.job)
        optimizer = torch.optim.SGD(self.parameters, lr, momentum=job.local.momentum, fused=True)
        factors = self._factors()
        totals = torch.zeros(self.num_clients, device=batches.targets.device)
        for step, active in enumerate(batches.active):
            losses = self._losses(batches, step)
            optimizer.zero_grad()
            losses.sum().backward()
            self._decay(lr, factors)
            if job.local.scales or job.clip is not None:
                self._multiply(factors)
            if active < self.num_clients:
                _stand_still(optimizer, active)
            optimizer.step()
            totals[:active] += losses.detach()[:active]
        return totals / torch.tensor(batches.steps).to(totals.device, non_blocking=True)

    def logits(self, batches: "Batches", step: int) -> Tensor:
        """Return the logits of every sample of a step, (G·B, …, classes)."""
        self.masks.begin(batches.seeds[step].flatten())
        return self.model(channels_last(self.job.dataset.prepare(batches.inputs[step].flatten(0, 1))))

    def _losses(self, batches: "Batches", step: int) -> Tensor:
        """Return each client's mean cross-entropy over the targets of its own batch, (G,)."""
        targets, ignored = batches.targets[step].flatten(), self.job.dataset.ignore_index
        with mixed_precision(self.job.local, targets.device):
            each = cross_entropy(self.logits(batches, step), targets, ignored, reduction="none")
        return each.view(self.num_clients, -1).sum(dim=1) / batches.counts[step]

    @torch.no_grad()
    def _decay(self, lr: float, factors: Sequence[Tensor]) -> None:
        """Add the gradient of strength·‖UΩVᵀ‖²_F: 2UΩ(VᵀV)Ω for u', 2V(ΩUᵀUΩ) for v'."""
        local = self.job.local
        strength = local.frobenius_decay
        for layer, factor in zip(self.layers, factors, strict=True) if strength else ():
            step = lr * strength * factor
            omega = decay_multipliers(local.frobenius_decay_of, layer.multipliers, layer.u, layer.v, step)[:, None]
            scaled = layer.u * omega
            assert layer.u.grad is not None
            assert layer.v.grad is not None
            layer.u.grad.addcmul_(torch.bmm(scaled, torch.bmm(layer.v.mT, layer.v)), omega, value=2 * strength)
            layer.v.grad.baddbmm_(layer.v, torch.bmm(scaled.mT, scaled), alpha=2 * strength)

    def _factors(self) -> list[Tensor]:
        """Return what each layer's gradients are multiplied by, each client's own, (G, n)."""
        if self.job.local.scales:
            return scale_factors(self.layers)
        return clip_factors(self.layers, inf if self.job.clip is None else self.job.clip)

    def _multiply(self, factors: Sequence[Tensor]) -> None:
        """Multiply the gradients of u'ᵢ and v'ᵢ."""
        for layer, factor in zip(self.layers, factors, strict=True):
            for parameter in (layer.u, layer.v):
                assert parameter.grad is not None
                parameter.grad.mul_(factor[:, None])


class Batches:
    """What G clients train on in a round, padded to batches of one size, the largest that any of them has.

    Attributes:
        steps: that each client takes, not increasing.
        active: how many clients still have a step to take, at each step.
        inputs: raw, (steps, G, B, …). Padding repeats a sample of the same client.
        targets: (steps, G, B, …), those of padding at the dataset's `ignore_index`.
        counts: targets that count, (steps, G); 1 for a client that has taken all its steps.
        seeds: of the samples' dropout masks, (steps, G, B).
    """

    def __init__(self, clients: Sequence[ClientData], keys: Sequence[Key], job: Job) -> None:
        local, device = job.local, clients[0].targets.device
        self.steps = [num_steps(data, local) for data in clients]
        assert self.steps == sorted(self.steps, reverse=True), "those who take the most steps come first"
        longest = self.steps[0]
        self.active = [sum(step < steps for steps in self.steps) for step in range(longest)]
        rows = max(largest_batch(len(data), local) for data in clients)
        inputs, targets, seeds = [], [], []
        for data, key in zip(clients, keys, strict=True):
            drawn = draw_passes(data, job.dataset, local, key)
            places, padding = (part[:, :rows].to(device) for part in _places(len(data), longest, local))
            inputs.append(drawn.inputs[places])
            wanted = drawn.targets[places]
            padding = padding.view(*padding.shape, *[1] * (wanted.dim() - 2))
            targets.append(wanted.masked_fill(padding, job.dataset.ignore_index))
            seeds.append(sample_seeds(longest, local.batch_size, key)[:, :rows])
        self.inputs, self.targets = torch.stack(inputs, dim=1), torch.stack(targets, dim=1)
        self.seeds = torch.stack(seeds, dim=1).to(device)
        done = torch.tensor([[step >= steps for steps in self.steps] for step in range(longest)]).to(device)
        self.counts = (self.targets != job.dataset.ignore_index).flatten(2).sum(dim=2).masked_fill(done, 1)


def _places(samples: int, steps: int, local: LocalConfig) -> tuple[Tensor, Tensor]:
    """Return where each batch's samples stand among those of all passes, and which are padding, both (steps, B)."""
    count, length = passes(samples, local)
    per_pass = -(-length // local.batch_size)
    step, row = np.arange(steps)[:, None], np.arange(local.batch_size)
    number, start = step // per_pass, step % per_pass * local.batch_size
    padding = (start + row >= length) | (number >= count)
    places = number * length + start + np.where(padding, 0, row)
    return torch.from_numpy(np.where(number >= count, 0, places)), torch.from_numpy(padding)


def _stand_still(optimizer: torch.optim.Optimizer, active: int) -> None:
    """Keep the clients from `active` on where they are: no gradient, no momentum."""
    for parameter in optimizer.param_groups[0]["params"]:
        momentum = optimizer.state[parameter].get("momentum_buffer")
        for moving in (parameter.grad, momentum):
            if moving is not None:
                moving[active:] = 0
