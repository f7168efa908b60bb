"""The largest terms against an SVD in float64."""

import pytest
import torch

from sharding.matrices.spectrum import largest_terms

DECAYS = {
    "flat": lambda n: torch.ones(n),
    "random": None,
    "linear": lambda n: torch.arange(n, 0, -1.0),
    "harmonic": lambda n: 1 / torch.arange(1, n + 1.0),
    "steep": lambda n: 0.8 ** torch.arange(n),
    "low rank": lambda n: torch.arange(n) < 3.0,
    "huge": lambda n: 1e30 / torch.arange(1, n + 1.0) ** 0.3,
    "tiny": lambda n: 1e-30 / torch.arange(1, n + 1.0) ** 0.3,
}


def matrix(decay, rows, columns, blocks=1):
    torch.manual_seed(0)
    random = torch.randn(blocks, rows, columns, dtype=torch.float64)
    if DECAYS[decay] is None:
        return random
    left, _, right = torch.linalg.svd(random, full_matrices=False)
    return left * DECAYS[decay](min(rows, columns)).double() @ right


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("shape", [(60, 90), (90, 60), (40, 30, 3)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "precision", "excess"),
    [(torch.float32, 2e-5, 2e-6), (torch.float64, 1e-10, 1e-12), (torch.bfloat16, 2e-2, 2e-4)],
)
@pytest.mark.parametrize("num_terms", [1, 12])
def test_largest_terms_of_any_spectrum_have_the_least_error(decay, shape, dtype, precision, excess, num_terms):
    blocks = matrix(decay, *shape).to(dtype)
    u, v = (factor.double().unflatten(0, (len(blocks), -1)) for factor in largest_terms(blocks, num_terms))
    singular = torch.linalg.svdvals(blocks.double())
    magnitudes, largest = u.norm(dim=1) * v.norm(dim=1), singular[:, :1]
    torch.testing.assert_close(magnitudes / largest, singular[:, :num_terms] / largest, rtol=0, atol=precision)
    error = torch.linalg.matrix_norm(blocks.double() - u @ v.mT) ** 2
    norm = torch.linalg.matrix_norm(blocks.double()) ** 2
    least = singular[:, num_terms:].square().sum(dim=1)
    assert ((error - least) / norm).abs().max() < excess
    if decay != "low rank":  # where a term is zero u' is not, so that it can train
        torch.testing.assert_close(u.norm(dim=1), v.norm(dim=1), rtol=precision, atol=0)


def test_largest_terms_under_autocast_are_not_rounded():
    blocks = matrix("random", 60, 90).float()
    expected = largest_terms(blocks, 12)
    with torch.autocast("cpu", torch.bfloat16):
        actual = largest_terms(blocks, 12)
    assert all(map(torch.equal, actual, expected))
