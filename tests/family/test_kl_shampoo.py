"""Online KL-Shampoo: equal to its authors' numbers, and to a float64 reference with exact roots."""

import json

import pytest
import torch

from muonsw.algorithms.kl_shampoo import _above_eigenvalues, inverse_sqrt, kl_shampoo, scale
from tests.family.gradients import gradient, start
from tests.family.record.kl_shampoo import RECORDED
from tests.family.references.kl_shampoo import ReferenceKLShampoo

RUNS = json.loads(RECORDED.read_text(encoding="utf-8"))["runs"]
OPTIONS = {"betas": (0.9684, 0.9482), "eps": 1e-9, "ns_dtype": "auto"}


def fresh(count, m, n, dtype=torch.float64):
    shapes = {"exp_avg": (m, n), "factors_left": (m, m + 1), "factors_right": (n, n + 1)}
    return {key: torch.zeros(count, *shape, dtype=dtype) for key, shape in shapes.items()}


def directions(gradients, first=1, **options):
    """The scaled direction of every step from gradients (steps, count, m, n)."""
    group, (count, m, n) = OPTIONS | options, gradients[0].shape
    state = fresh(count, m, n, gradients[0].dtype)
    for step, G in enumerate(gradients, start=first):
        direction, state = kl_shampoo(group | {"update_count": step}, G, state)
        yield scale(group, m, n) * direction


@pytest.mark.parametrize("run", RUNS, ids=lambda run: str(run["shape"]))
def test_it_equals_the_authors_float16_roots_to_their_rounding(run):
    """Each of the three products of the ten steps of two roots rounds its operands to eleven bits."""
    expected, weight, found = torch.tensor(run["float16"]), start(run["shape"]).float(), []
    moved = (expected - weight).norm()
    gradients = [gradient(run["shape"], step).float()[None] for step in range(len(expected))]
    for direction in directions(gradients, betas=run["betas"], eps=run["eps"], ns_dtype="float16"):
        weight = weight - run["lr"] * direction[0]
        found.append(weight)
    assert (torch.stack(found) - expected).norm() < 60 * 2**-11 * moved


@pytest.mark.parametrize(("m", "n"), [(5, 5), (4, 9), (8, 3)])
def test_it_equals_the_reference_with_exact_roots(m, n):
    """To what ten steps of the iteration leave, 3e-5 a root for eigenvalues within a factor of a million, three roots
    in each direction; eps keeps them there."""
    gradients = torch.randn(20, 3, m, n, dtype=torch.float64)
    references = [ReferenceKLShampoo((m, n), 0.9, 0.8, 1e-4) for _ in range(3)]
    for step, direction in enumerate(directions(gradients, betas=(0.9, 0.8), eps=1e-4)):
        expected = torch.stack([reference.direction(gradients[step, i]) for i, reference in enumerate(references)])
        assert (direction - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 3e-5), (torch.float16, 30 * 2**-11)])
def test_inverse_square_roots_of_eigenvalues_over_six_decades(dtype, error):
    Q = torch.linalg.qr(torch.randn(3, 16, 16, dtype=torch.float64)).Q
    values = torch.logspace(0, -6 if dtype == torch.float64 else -3, 16, dtype=torch.float64)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    found = inverse_sqrt((37 * Q * values @ Q.mT).to(wide), dtype).double()
    expected = Q * (37 * values) ** -0.5 @ Q.mT
    assert ((found - expected).norm() / expected.norm()) < error


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_the_bound_is_above_all_eigenvalues_and_near(size):
    A = torch.randn(20, 8, 8) * size**0.5
    S = A @ A.mT
    above = _above_eigenvalues(S)[:, 0, 0].double()
    largest = torch.linalg.eigvalsh(S.double())[:, -1]
    assert (above >= largest * (1 - 1e-6)).all()
    assert (above <= 2 * largest).all()


def test_late_beginners_and_gradients_of_zero_are_safe():
    """As after a first step that a flag on the device has undone."""
    G = torch.randn(6, 2, 5, 3)
    late = list(directions(G, first=2))
    assert all(direction.norm() < 3 * 15**0.5 for direction in late)
    _, state = kl_shampoo(OPTIONS | {"update_count": 2}, G[0], fresh(2, 5, 3, torch.float32))
    assert all(tensor.isfinite().all() for tensor in state.values())
    zero = torch.zeros(3, 2, 5, 3)
    assert not any(direction.any() for direction in directions(zero))
    assert all(direction.isfinite().all() for direction in directions(torch.cat([zero, G])))


@pytest.mark.parametrize("zeros", [1, 3])
def test_a_gradient_of_zero_begins_nothing(zeros):
    """Layers before a projection of zeros have none at first; they then step as late beginners do."""
    G = torch.randn(12, 2, 5, 3)
    G[:, 1] = G[:, 0]
    G[:zeros, 1] = 0.0
    late = list(directions(G[zeros:, 1:], first=1 + zeros))
    for expected, found in zip(late, list(directions(G))[zeros:], strict=True):
        torch.testing.assert_close(found[1:], expected)


def test_late_beginners_step_alike_whatever_the_size_of_gradients():
    G = torch.randn(6, 2, 5, 3, dtype=torch.float64)
    for small, large in zip(directions(G, first=2), directions(1e3 * G, first=2), strict=True):
        torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-7)
