"""The algorithm in plain torch (examples/one_round.py) against the library."""

import pytest
import torch
from torch import nn

from examples.one_round import one_round
from sharding import Server, ShardPlanner, train_shard

UNEVEN = {"phone": 0.25, "tablet": 0.5, "laptop": 0.5}
MANY = dict.fromkeys(range(60), 0.25)  # ω of a rare term is up to 60, and clipped at 10


@pytest.mark.parametrize(("ratios", "clips"), [(UNEVEN, False), (MANY, True)])
def test_server_round_equals_one_round(ratios, clips):
    torch.manual_seed(0)
    layers = [nn.Linear(*sizes, bias=False, dtype=torch.float64) for sizes in ((6, 12), (12, 12), (12, 4))]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    data = {
        client: (torch.randn(count, 6, dtype=torch.float64), torch.randint(4, (count,)))
        for client, count in zip(ratios, (30, 20, 50) * 20, strict=False)
    }

    def train(client, shard):
        inputs, targets = data[client]
        return train_shard(model, shard, zip(inputs.split(10), targets.split(10), strict=True), 0.1)

    server, sizes = Server(model, ShardPlanner("collective")), {client: len(x) for client, (x, _) in data.items()}
    weights = tuple(layer.weight.detach().clone() for layer in layers)
    for t in range(3):
        largest = max(float(draw.multipliers.max()) for draw in server.plan(ratios, t).draws.values())
        assert (largest > 10) == clips
        before = [weight.clone() for weight in weights]
        weights = one_round(weights, ratios, data, t)
        server.round(t, ratios, train, sizes)
        for layer, ours, start in zip(layers, weights, before, strict=True):
            assert not torch.allclose(ours, start, rtol=1e-3)
            torch.testing.assert_close(layer.weight.detach(), ours, rtol=1e-12, atol=1e-12)
