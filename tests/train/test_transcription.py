"""The published training, transcribed a second time: a run of the program is equal to it, to rounding.

`published_rounds` is written from the paper alone (Korzhenkov & Louizos 2024, arXiv 2410.24106; sections in brackets),
in plain torch, with full matrices and without the library: the decay is a term of the loss, and autograd has all
gradients. From the program it takes what is drawn, namely the first weights, each round's clients, their terms and
multipliers, and their batches.
"""

from dataclasses import dataclass, replace
from functools import wraps
from math import ceil, cos, pi

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, cross_entropy

from models import MODELS
from models.resnet import ResNetGN
from sharding import Plan
from train.callbacks import Callback
from train.config.schema import load_config
from train.data import Split
from train.data.vision import empty_images
from train.engines.local_training import raw_batches
from train.experiment import assembly
from train.run import run

Weights = dict[str, Tensor]
Terms = dict[str, tuple[Tensor, Tensor]]  # of each sharded layer: the indices of a client's terms, and their ω
SHARDED = ("stages.0.0.conv1", "stages.0.0.conv2", "stages.1.0.conv1", "stages.1.0.conv2")  # shortcuts are whole


@dataclass(frozen=True)
class Client:
    """One client in one round: its batches of all epochs in order, its size D, its terms (none: it has all weights)."""

    batches: list[tuple[Tensor, Tensor]]
    size: int
    terms: Terms


def network(weights: Weights, images: Tensor, groups: int) -> Tensor:
    """ResNet with GroupNorm and a first kernel of 3x3 [4.1], two blocks, the second of stride 2."""

    def conv(name: str, maps: Tensor, stride: int) -> Tensor:
        kernel = weights[f"{name}.weight"]
        return conv2d(maps, kernel, stride=stride, padding=kernel.shape[-1] // 2)

    def norm(name: str, maps: Tensor) -> Tensor:
        grouped = maps.reshape(len(maps), groups, -1)
        variance, mean = torch.var_mean(grouped, dim=2, correction=0, keepdim=True)
        whitened = ((grouped - mean) / (variance + 1e-5).sqrt()).reshape(maps.shape)
        return whitened * weights[f"{name}.weight"][:, None, None] + weights[f"{name}.bias"][:, None, None]

    maps = norm("norm1", conv("conv1", images, 1)).relu()
    for block, stride in (("stages.0.0", 1), ("stages.1.0", 2)):
        inner = norm(f"{block}.bn1", conv(f"{block}.conv1", maps, stride)).relu()
        inner = norm(f"{block}.bn2", conv(f"{block}.conv2", inner, 1))
        if stride == 2:
            maps = norm(f"{block}.downsample.1", conv(f"{block}.downsample.0", maps, stride))
        maps = (maps + inner).relu()
    return maps.mean((2, 3)) @ weights["fc.weight"].T + weights["fc.bias"]


def svd(weight: Tensor) -> tuple[Tensor, Tensor]:
    """U and V with a column √λu and √λv for each term, of W (out, in·kh·kw) [3.1, 4.1]."""
    left, magnitudes, right = torch.linalg.svd(weight.flatten(1), full_matrices=False)
    return left * magnitudes.sqrt(), right.T * magnitudes.sqrt()


def train_locally(trained: Weights, client: Client, like: Weights, lr: float, tau: float, groups: int) -> float:
    """Train a client's tensors in place: SGD with momentum 0.9 on the loss and 1e-4 ‖UΩVᵀ‖² [3.3]; the mean loss."""
    velocities = {name: torch.zeros_like(part) for name, part in trained.items()}
    total = 0.0
    for images, targets in client.batches:
        leaves = {name: part.detach().requires_grad_() for name, part in trained.items()}
        products = {  # Ŵ = UΩVᵀ, with Ω constant in the round
            f"{layer}.weight": (leaves[f"{layer}.u"] * omega @ leaves[f"{layer}.v"].T).view_as(like[f"{layer}.weight"])
            for layer, (_, omega) in client.terms.items()
        }
        loss = cross_entropy(network(leaves | products, images, groups), targets)
        decay = sum((product.square().sum() for product in products.values()), torch.zeros(()))
        gradients = torch.autograd.grad(loss + 1e-4 * decay, list(leaves.values()))
        for (name, part), gradient in zip(trained.items(), gradients, strict=True):
            layer = name.rpartition(".")[0]
            if layer in client.terms:  # a vector of large ω learns at most τ times as fast as one of ω = 1
                gradient = gradient * (tau / client.terms[layer][1]).clamp(max=1)
            velocities[name] = 0.9 * velocities[name] + gradient
            part -= lr * velocities[name]
        total += loss.item()
    return total / len(client.batches)


def mean(pairs: list[tuple[int, Tensor]]) -> Tensor:
    """The mean of clients' tensors, weighted by D."""
    return sum(size * value for size, value in pairs) / sum(size for size, _ in pairs)


def published_rounds(weights: Weights, rounds: list[list[Client]], lr: float, tau: float, groups: int) -> list[Weights]:
    """The server's weights after each round, and the clients' mean losses as `loss` [3.1]."""
    after = []
    for t, clients in enumerate(rounds):
        sides = {layer: svd(weights[f"{layer}.weight"]) for layer in clients[0].terms}
        updates, losses = [], []
        for client in clients:
            trained = {name: part.clone() for name, part in weights.items() if name[: -len(".weight")] not in sides}
            for layer, (indices, _) in client.terms.items():
                for side, vectors in zip("uv", sides[layer], strict=True):
                    trained[f"{layer}.{side}"] = vectors[:, indices].clone()
            now = lr * (1 + cos(pi * t / len(rounds))) / 2  # cosine annealing [4.1], here by rounds
            losses.append((client.size, torch.tensor(train_locally(trained, client, weights, now, tau, groups))))
            updates.append((client, trained))
        for layer, (u, v) in sides.items():  # each vector is averaged by itself, over those who have it
            for side, vectors in (("u", u), ("v", v)):
                for index in range(vectors.shape[1]):
                    holders = [
                        (client.size, trained[f"{layer}.{side}"][:, client.terms[layer][0].tolist().index(index)])
                        for client, trained in updates
                        if index in client.terms[layer][0]
                    ]
                    if holders:
                        vectors[:, index] = mean(holders)
        whole = [name for name in weights if name[: -len(".weight")] not in sides]
        averages = {name: mean([(client.size, trained[name]) for client, trained in updates]) for name in whole}
        composed = {f"{layer}.weight": (u @ v.T).view_as(weights[f"{layer}.weight"]) for layer, (u, v) in sides.items()}
        weights = averages | composed  # Ω is not part of the new weights
        after.append(weights | {"loss": mean(losses)})
    return after


class InDoubles(ResNetGN):
    """The program's network in float64, so that rounding hides nothing."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.double())


@wraps(ResNetGN)
def build_in_doubles(*args, **options) -> ResNetGN:
    """The network as built, but for its norms, which start at other values than 0 and 1, so that all weights move."""
    model = InDoubles(*args, **options).double()
    for part in model.modules():
        if isinstance(part, nn.GroupNorm):
            nn.init.uniform_(part.weight, 0.5, 1.5)
    return model


class Observed(Callback):
    """What the transcription needs of a run, and what it is compared with."""

    def __init__(self) -> None:
        self.rounds: list[list[Client]] = []
        self.after: list[Weights] = []

    def before_training(self, experiment) -> None:
        self.experiment, self.start = experiment, self.weights_of(experiment.model)

    def after_round(self, metrics, plan) -> None:
        self.rounds.append([self.client(client, metrics.round, plan) for client in plan])
        self.after.append(self.weights_of(self.experiment.model) | {"loss": torch.tensor(metrics.train_loss)})

    def weights_of(self, model) -> Weights:
        return {name: part.detach().clone() for name, part in model.state_dict().items()}

    def client(self, client: int, t: int, plan: Plan) -> Client:
        job, terms = self.experiment.job, {}
        data, prepare = job.clients[client], job.dataset.prepare
        batches = raw_batches(data, job.dataset, job.local, (job.seed, t, client))
        for (ratio, layer), draw in plan.draws.items():
            if client in plan.groups[ratio]:
                row, weight = plan.groups[ratio].index(client), self.start[f"{layer}.weight"]
                terms[layer] = torch.from_numpy(draw.indices[row]), torch.from_numpy(draw.multipliers[row])
                assert len(terms[layer][0]) == ceil(min(weight.flatten(1).shape) * ratio)
        return Client([(prepare(images).double(), targets) for images, targets in batches], len(data), terms)


def drawn_images(name: str, **_: object):
    """Few images of noise in the place of the real ones."""
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(256, (90, 3, 8, 8), generator=rng, dtype=torch.uint8)
    targets = torch.randint(10, (90,), generator=rng)
    splits = Split(images[:80], targets[:80]), Split(images[80:], targets[80:])
    return replace(empty_images(name), train=splits[0], test=splits[1], input_shape=(3, 8, 8))


@pytest.mark.parametrize(("strategy", "tau"), [("dense", 10.0), ("collective", 1.5), ("unbiased", 2.0)])
def test_run_of_the_published_recipe_is_the_papers_training(strategy, tau, tmp_path, monkeypatch):
    """A small τ, so that clipping acts; clients of unequal sizes and keep ratios."""
    monkeypatch.setattr(assembly, "load_dataset", drawn_images)
    monkeypatch.setitem(MODELS, "resnet18_gn", build_in_doubles)
    cut = ["model={name: resnet18_gn, width: 8, blocks: [1, 1], groups: 2}", "rounds=3", "local.batch_size=8"]
    cut += ["clients={count: 6, per_round: 5}", "data.partition={name: power_law, alpha: 0.5}", "engine=sequential"]
    cut += [f"strategy={strategy}", f"local.clip={tau}", "keep_ratio={0.2: 0.5, 0.4: 0.5}", f"output={tmp_path}"]
    config = load_config("configs/cifar10_resnet18.yaml", cut)
    run(config, [observed := Observed()])

    transcribed = published_rounds(observed.start, observed.rounds, lr=0.1, tau=tau, groups=2)

    drawn = [client.terms for clients in observed.rounds for client in clients]
    assert all(tuple(terms) == (() if strategy == "dense" else SHARDED) for terms in drawn)
    assert strategy == "dense" or max(omega.max() for terms in drawn for _, omega in terms.values()) > tau
    assert len({client.size for client in observed.rounds[0]}) > 1
    for ours, theirs in zip(observed.after, transcribed, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9, check_dtype=False)
    moved = (observed.after[-1]["stages.1.0.conv1.weight"] - observed.start["stages.1.0.conv1.weight"]).abs().max()
    assert moved > 0.001
