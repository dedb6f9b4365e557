"""SOAP: equal to a float64 reference, and steady where eigendecompositions are not."""

import pytest
import torch

from muonsw.algorithms import factors
from muonsw.algorithms.factors import cholesky_qr, eigenbasis
from muonsw.algorithms.soap import soap, whitened_momentum
from muonsw.algorithms.triangles import pack, packed_shape
from muonsw.machine import full_float32
from tests.family.references.soap import ReferenceSOAP

OPTIONS = {"betas": (0.95, 0.95), "shampoo_beta": None, "eps": 1e-8, "precondition_frequency": 10}


def fresh(count, m, n, longest=10000, dtype=torch.float64):
    left, right = (1 if length > longest else length for length in (m, n))
    shapes = {"basis_left": (left, left), "basis_right": (right, right)}
    shapes |= {"factor_left": packed_shape(left), "factor_right": packed_shape(right)}
    shapes |= {"exp_avg": (m, n), "exp_avg_sq": (m, n), "moves": (1, 1)}
    return {key: torch.zeros(count, *shape, dtype=dtype) for key, shape in shapes.items()}


def directions(gradients, state, **options):
    """The direction of every step from gradients (steps, count, m, n), and the state at the end."""
    group, seen = OPTIONS | options, []
    for step, G in enumerate(gradients):
        direction, state = soap(group | {"update_count": step + 1}, G, state)
        seen.append(direction)
    return seen, state


@pytest.mark.parametrize(("m", "n", "longest"), [(5, 5, 9), (4, 9, 9), (8, 3, 9), (4, 9, 6), (9, 4, 6)])
@pytest.mark.parametrize("frequency", [1, 3])
def test_it_equals_the_reference_over_many_steps(m, n, longest, frequency):
    gradients = torch.randn(25, 3, m, n, dtype=torch.float64)
    options = {"betas": (0.9, 0.8), "shampoo_beta": 0.95, "precondition_frequency": frequency}
    state = fresh(3, m, n, longest)
    references = [ReferenceSOAP((m, n), 0.9, 0.8, 0.95, f=frequency, longest=longest) for _ in range(3)]
    # The first gradient of a rectangular matrix leaves a factor singular, and rounding would choose its null space.
    for axis, side in enumerate(("left", "right")):
        if (m, n)[axis] <= longest:
            whole = torch.diag(torch.arange(1.0, (m, n)[axis] + 1, dtype=torch.float64))
            state[f"factor_{side}"] += pack(whole)
            for reference in references:
                reference.factors[axis] = whole
    for step, direction in enumerate(directions(gradients, state, **options)[0]):
        expected = torch.stack([reference.direction(gradients[step, i]) for i, reference in enumerate(references)])
        torch.testing.assert_close(direction, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("orthonormal", [factors.orthonormal, cholesky_qr])
def test_float32_follows_float64(orthonormal, monkeypatch):
    """To the rounding of 30 steps, 12 terms, and eigenvalues that lie a hundredth apart: 6e-8 * 30 * 12 / 0.01."""
    gradients = torch.randn(30, 2, 12, 12, dtype=torch.float64)
    wide = directions(gradients, fresh(2, 12, 12))[0][-1]
    monkeypatch.setattr(factors, "orthonormal", orthonormal)
    single = directions(gradients.float(), fresh(2, 12, 12, dtype=torch.float32))[0][-1]
    assert (single.double() - wide).norm() < 2.2e-3 * wide.norm()


def test_products_are_in_full_float32_whatever_the_global_precision():
    gradients = torch.randn(3, 1, 256, 256)
    expected = directions(gradients, fresh(1, 256, 256, dtype=torch.float32))[0]
    torch.set_float32_matmul_precision("medium")
    try:
        found = directions(gradients, fresh(1, 256, 256, dtype=torch.float32))[0]
        assert torch.get_float32_matmul_precision() == "medium"
        with full_float32():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_factor_that_cannot_be_decomposed_keeps_its_basis_and_the_others_get_theirs():
    factors = torch.stack([torch.diag(torch.tensor([1.0, 2.0])), torch.full((2, 2), torch.nan)])
    old = torch.full((2, 2, 2), 7.0)
    with pytest.warns(UserWarning, match="no eigendecomposition of a 2 x 2 factor"):
        basis = eigenbasis(factors, old)
    torch.testing.assert_close(basis[0].abs(), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    assert torch.equal(basis[1], old[1])


def test_a_late_beginner_moves_as_adam_until_the_next_refresh():
    """As after a first step that a flag on the device has undone, or with a first gradient in the middle of a run."""
    gradients, state = torch.randn(6, 1, 4, 4, dtype=torch.float64), fresh(1, 4, 4)
    adam = PlainAdam()
    for step, G in enumerate(gradients, start=8):
        direction, state = soap(OPTIONS | {"update_count": step}, G, state)
        if step == 8:
            assert not direction.any()
        elif step <= 11:
            torch.testing.assert_close(direction[0], adam.direction(G[0]), rtol=1e-9, atol=0)
        assert torch.equal(state["basis_left"][0], torch.eye(4, dtype=torch.float64)) == (8 < step < 11)
    Q = state["basis_left"][0]
    torch.testing.assert_close(Q.T @ Q, torch.eye(4, dtype=torch.float64))


class PlainAdam:
    """Adam with an epsilon beside the root before it is corrected, as in SOAP."""

    def __init__(self):
        self.m, self.v, self.t = 0.0, 0.0, 0

    def direction(self, G):
        self.t += 1
        self.m, self.v = 0.95 * self.m + 0.05 * G, 0.95 * self.v + 0.05 * G**2
        return (1 - 0.95**self.t) ** -0.5 * self.m / (self.v**0.5 + 1e-8)


def test_whitened_momentum_has_squares_of_one_in_the_eigenbasis():
    """With beta = 0 each element is divided by its own size, in the basis of the gradient before."""
    state = {key: tensor for key, tensor in fresh(2, 5, 5).items() if key not in ("exp_avg", "moves")}
    first, second, U = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    found, state = whitened_momentum(U, first, state, 0.0, 1e-8, first=True)
    assert torch.equal(found, U)
    found, _ = whitened_momentum(U, second, state, 0.0, 1e-8)
    left, _, right = torch.linalg.svd(first)
    torch.testing.assert_close((left.mT @ found @ right.mT).abs(), torch.ones(2, 5, 5, dtype=torch.float64))


def signed(Q, like):
    """Q with the signs of other columns."""
    return Q * (Q.double() * like).sum(-2, keepdim=True).sign()


def with_condition(number, count=3, d=96):
    bases = torch.linalg.qr(torch.randn(2, count, d, d, dtype=torch.float64)).Q
    return (bases[0] * torch.logspace(0, -number, d, dtype=torch.float64)) @ bases[1].mT


@pytest.mark.parametrize("condition", [0, 4, 8, 12])
def test_qr_by_cholesky_is_that_of_float64(condition):
    """To the rounding of float32 whatever the condition number, where QR in float32 is wrong from 1e7 on."""
    X = with_condition(condition).float()
    expected, Q = torch.linalg.qr(X.double()).Q, cholesky_qr(X, torch.zeros_like(X))
    torch.testing.assert_close(signed(Q, expected).double(), expected, rtol=0, atol=2e-7)


def test_qr_by_cholesky_keeps_columns_of_zeros_and_leaves_singular_matrices_to_qr():
    X = with_condition(2).float()
    identity = torch.eye(96).repeat(3, 1, 1)
    X[0, :, 7] = X[0, 7] = 0
    X[1, :, 5] = X[1, :, 4]  # twice the same column
    Q = cholesky_qr(X, identity)
    torch.testing.assert_close(Q.mT @ Q, identity, rtol=0, atol=2e-6)
    assert torch.equal(Q[0, :, 7].abs(), identity[0, :, 7])
    torch.testing.assert_close(Q[1], torch.linalg.qr(X[1]).Q)
    for nothing in (0.0, torch.nan):
        assert torch.equal(cholesky_qr(torch.full_like(X, nothing), identity), identity)
