"""Models with tensors that `deepcopy` refuses: every function that copies a model copies them or raises."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm, weight_norm

from sharding import (
    ShardPlanner,
    UserError,
    client_model,
    factorize,
    load_factorized,
    merge,
    save_factorized,
    train_shard,
    unpack_attention,
)

COMPUTED = {
    "weight norm": weight_norm,
    "spectral norm": spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}
pytestmark = [
    pytest.mark.filterwarnings("ignore:only .* are factorized"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated"),
]


@pytest.fixture(params=COMPUTED)
def case(request):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(4)]
    model, x = nn.Sequential(*layers[:1], COMPUTED[request.param](layers[1]), *layers[2:]).double(), torch.randn(3, 8)
    model(x.double())
    assert not model[1].weight.is_leaf
    return model.eval(), x.double()


def test_copies_of_a_model_with_computed_weights_compute_the_same(case, tmp_path):
    model, x = case
    small = factorize(model, 1.0)
    save_factorized(small, tmp_path)
    copies = {
        "factorized": small,
        "merged": merge(small),
        "unpacked": unpack_attention(model),
        "loaded": load_factorized(tmp_path, model),
        "client's": client_model(model, ShardPlanner("full").plan(model, {0: 1.0}).shard(0)),
    }
    for name, copy in copies.items():
        torch.testing.assert_close(copy(x), model(x), rtol=0, atol=1e-10, msg=name)


def test_train_shard_of_a_model_with_computed_weights_changes_it(case):
    model, x = case
    shard = ShardPlanner().plan(model, {0: 0.5}).shard(0)
    update = train_shard(model, shard, [(x, torch.tensor([0, 1, 2]))], 0.1)
    assert not torch.equal(update.whole["0.weight"], shard.whole["0.weight"])


class Caches(nn.Linear):
    """Keeps what it computed, as timm's LeViT does."""

    def forward(self, x):
        self.cache = {"bias": [self.bias * 2]}
        return super().forward(x)


def test_copies_of_a_module_that_caches_computed_tensors_compute_the_same():
    model, x = nn.Sequential(Caches(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8)
    expected = model(x)
    assert not model[0].cache["bias"][0].is_leaf
    torch.testing.assert_close(factorize(model, 1.0)(x), expected)
    shard = ShardPlanner("full").plan(model, {0: 1.0}).shard(0)
    torch.testing.assert_close(client_model(model, shard)(x), expected)


def test_copy_of_a_module_with_a_tensor_out_of_sight_raises_usererror():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model[0].cache = SimpleNamespace(tensor=model[0].weight * 2)
    with pytest.raises(UserError, match="this Sequential cannot be copied: Only Tensors created explicitly"):
        factorize(model, 0.5)
