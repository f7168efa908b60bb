"""The terms of a product of factors, against a decomposition of the product itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharding.matrices.product import decompose_product
from sharding.matrices.spectrum import all_terms, compose, decompose

CLOSE = {"rtol": 0, "atol": 1e-10}


def factors(rows=9, columns=7, n=4, blocks=1, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(blocks, size, n, generator=generator, dtype=torch.float64) for size in (rows, columns))


def product(a, b):
    return (a @ b.mT).flatten(0, 1)


def moved(a, b, spectrum, u, v):
    """Return the product of the factors after the terms moved."""
    changes = spectrum.changes(u, v).values()
    return product(*(side + change.view_as(side) for side, change in zip((a, b), changes, strict=True)))


@pytest.mark.parametrize("shape", [(9, 7, 4), (7, 9, 7), (5, 5, 1)], ids=str)
@pytest.mark.parametrize("blocks", [1, 3])
def test_terms_equal_those_of_the_matrix(shape, blocks):
    a, b = factors(*shape, blocks)
    spectrum = decompose_product(a, b)
    dense = decompose({"": a @ b.mT})[""]
    n = shape[2]
    torch.testing.assert_close(spectrum.magnitudes, dense.magnitudes[:n], **CLOSE)
    torch.testing.assert_close(compose(spectrum.u, spectrum.v, blocks), product(a, b), **CLOSE)
    for i in range(n):
        one, other = (compose(each.u[:, [i]], each.v[:, [i]], blocks) for each in (spectrum, dense))
        torch.testing.assert_close(one, other, rtol=0, atol=1e-8)
    u, v = (side.unflatten(0, (blocks, -1)) for side in (spectrum.u, spectrum.v))
    torch.testing.assert_close(u.norm(dim=1), v.norm(dim=1), **CLOSE)


@given(st.integers(0, 1000), st.sampled_from([1, 2]), st.lists(st.integers(0, 3), min_size=1, unique=True))
def test_factors_follow_the_terms_that_moved_and_the_others_stay(seed, blocks, drawn):
    a, b = factors(blocks=blocks, seed=seed)
    indices = torch.tensor(sorted(drawn))
    everything, kept = (decompose_product(a, b, choose) for choose in (all_terms, lambda magnitudes: indices))
    assert torch.equal(kept.u, everything.u[:, indices])
    u, v = (torch.randn(side.shape, dtype=torch.float64) for side in (kept.u, kept.v))
    expected = product(a, b) + compose(u, v, blocks) - compose(kept.u, kept.v, blocks)
    torch.testing.assert_close(moved(a, b, kept, u, v), expected, rtol=1e-9, atol=1e-8)
    torch.testing.assert_close(moved(a, b, kept, kept.u, kept.v), product(a, b), rtol=0, atol=0)


DEGENERATE = {
    "one zero column in A": lambda a, b: a[..., 1].zero_(),
    "the last columns of A are zero": lambda a, b: a[..., 2:].zero_(),
    "one zero column in both": lambda a, b: (a[..., 1].zero_(), b[..., 1].zero_()),
    "B is zero": lambda a, b: b.zero_(),
    "A is zero": lambda a, b: a.zero_(),
    "both are zero": lambda a, b: (a.zero_(), b.zero_()),
    "equal columns in A": lambda a, b: a[..., 1].copy_(a[..., 0]),
    "equal columns in B": lambda a, b: b[..., 1].copy_(b[..., 0]),
    "a column has died out": lambda a, b: (a[..., 1].mul_(1e-30), b[..., 1].mul_(1e-30)),
    "unbalanced": lambda a, b: (a.mul_(1e6), b.mul_(1e-6)),
}


@pytest.mark.parametrize("kind", DEGENERATE)
def test_degenerate_factors_keep_their_product_and_terms_of_magnitude_zero_can_train(kind):
    a, b = factors()
    DEGENERATE[kind](a, b)
    spectrum = decompose_product(a, b)
    torch.testing.assert_close(compose(spectrum.u, spectrum.v), product(a, b), **CLOSE)
    u, v = spectrum.u + torch.randn_like(spectrum.u), spectrum.v + torch.randn_like(spectrum.v)
    assert moved(a, b, spectrum, u, v).isfinite().all()
    if "both" not in kind and "died" not in kind:
        assert torch.maximum(spectrum.u.norm(dim=0), spectrum.v.norm(dim=0)).min() > 0.1  # a step moves the other side
        torch.testing.assert_close(moved(a, b, spectrum, u, v), compose(u, v), rtol=0, atol=1e-6)


def test_steps_with_momentum_do_not_depend_on_the_factors_basis():
    a, b = (side[0] for side in factors())
    torch.manual_seed(0)
    products = []
    for basis in (torch.eye(4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)):
        left, right = torch.nn.Parameter(a @ basis), torch.nn.Parameter(b @ basis.inverse().mT)
        optimizer = torch.optim.SGD([left, right], lr=0.3, momentum=0.9, nesterov=True)
        for number in range(4):
            spectrum = decompose_product(left[None], right[None])
            drift = torch.randn(9, 7, generator=torch.Generator().manual_seed(number), dtype=torch.float64) / 10
            changes = spectrum.changes(spectrum.u + drift @ spectrum.v, spectrum.v + drift.mT @ spectrum.u)
            left.grad, right.grad = (-change for change in changes.values())
            optimizer.step()
        products.append((left @ right.mT).detach())
    torch.testing.assert_close(*products, rtol=0, atol=1e-9)
