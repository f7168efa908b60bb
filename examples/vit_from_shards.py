"""Train a timm vision transformer from shards: no client ever holds the dense model.

Twelve clients have handwritten digits; four take part in each round. Phones keep a quarter of each layer's terms,
laptops half.

    python examples/vit_from_shards.py
"""

import argparse

import numpy as np
import torch
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from sharding import Server, Shard, ShardPlanner, init_empty, train_shard

CLIENTS, COHORT, ROUNDS = 12, 4, 10


def make_model() -> nn.Module:
    """A small ViT for 8×8 images."""
    sizes = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10, "embed_dim": 64, "depth": 2}
    return VisionTransformer(**sizes, num_heads=4, weight_init="jax")


def batches(images: Tensor, labels: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Two epochs in a random order."""
    rng = np.random.default_rng(seed)
    order = torch.from_numpy(np.concatenate([rng.permutation(len(labels)) for _ in range(2)]))
    return [(images[rows], labels[rows]) for rows in order.split(32)]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of correct predictions."""
    return float((model.eval()(images).argmax(1) == labels).float().mean())


def main() -> None:
    """Train for some rounds and print the accuracy."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.from_numpy(digits.images / 16.0 - 0.5).float()[:, None]
    labels = torch.from_numpy(digits.target)
    train, test = slice(0, 1500), slice(1500, None)
    shares = np.array_split(np.random.default_rng(0).permutation(1500), CLIENTS)

    model = make_model()
    with init_empty():  # a client has only the structure, whose parameters take no memory
        structure = make_model()
    server = Server(model, ShardPlanner("collective"))
    print(f"before: {accuracy(model, images[test], labels[test]):.1%}")
    for round in range(ROUNDS):
        cohort = np.random.default_rng(round).choice(CLIENTS, COHORT, replace=False).tolist()
        plan = server.plan({client: 0.25 if client % 2 else 0.5 for client in cohort}, round)
        average = server.average(plan, {client: len(shares[client]) for client in cohort})
        for client, shard in plan.shards():
            received = Shard.from_bytes(shard.to_bytes())  # over the wire
            data = batches(images[train][shares[client]], labels[train][shares[client]], seed=round * CLIENTS + client)
            average.add(client, train_shard(structure, received, data, lr=0.1))
        server.step(average)
        print(f"round {round + 1}: {accuracy(model, images[test], labels[test]):.1%}")
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    for client, shard in plan.shards():
        print(f"client {client}, r = {shard.keep_ratio}: {shard.nbytes / whole:.0%} of the model's bytes")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
