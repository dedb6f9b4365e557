"""The numerics of algorithms with factors: roots, bases, late starts, and refused options."""

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from muonsw.algorithms import factors, kl_shampoo
from muonsw.algorithms.factors import cholesky_qr, eigenbasis, finite_or, inverse_root, power_iteration
from muonsw.machine import full_float32
from tests.family.references import gradient


def directions(gradients, algorithm, late=0, **options):
    """Directions of weights of equal shape at each step, from gradients (steps, count, m, n); and their final state.

    Before that, another parameter takes `late` steps alone.
    """
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in gradients[0]]
    other = nn.Parameter(torch.zeros_like(gradients[0, 0]))
    group = {"params": [*params, other], "algorithm": algorithm, **options}
    optimizer, actual = MuonSW([group], lr=1.0, weight_decay=0.0), []
    for step in range(-late, len(gradients)):
        other.grad = gradient(other.shape, step + late).to(other)
        before = torch.stack([param.detach() for param in params])
        for place, param in enumerate(params):
            param.grad = gradients[step, place].clone() if step >= 0 else None
        optimizer.step()
        if step >= 0:
            actual.append(before - torch.stack([param.detach() for param in params]))
    return actual, [optimizer.state[param] for param in params]


# roots and bases


def test_roots_of_nearly_semidefinite_and_non_finite_matrices():
    """Eigenvalues are shifted up until the smallest is eps; a matrix with a non-finite element is replaced."""
    eps, otherwise = 1e-4, torch.full((2, 2, 2), 7.0)
    root = inverse_root(torch.tensor([[[1.0, 0.0], [0.0, -0.01]]]), 0.5, eps, otherwise[:1])
    torch.testing.assert_close(root[0].diagonal(), torch.tensor([1.01 + eps, eps]).rsqrt())
    X = torch.ones(2, 2, 2)
    X[1, 0, 1] = torch.nan
    assert torch.equal(finite_or(X, otherwise), torch.stack([X[0], otherwise[1]]))


@pytest.mark.parametrize("orthonormal", [factors.orthonormal, cholesky_qr])
def test_soap_in_float32_follows_float64(orthonormal, monkeypatch):
    """Rounding in 30 steps of sums of 12 terms, with eigenvalues 0.01 apart: 6e-8 * 30 * 12 / 0.01."""
    gradients = torch.randn(30, 2, 12, 12, dtype=torch.float64)
    wide = directions(gradients, "soap")[0][-1]
    monkeypatch.setattr(factors, "orthonormal", orthonormal)
    single = directions(gradients.float(), "soap")[0][-1]
    assert (single.double() - wide).norm() < 2.2e-3 * wide.norm()


def test_products_are_in_full_float32_whatever_the_global_precision():
    gradients = torch.randn(3, 1, 256, 256)
    expected = directions(gradients, "soap")[0]
    torch.set_float32_matmul_precision("medium")
    try:
        actual = directions(gradients, "soap")[0]
        assert torch.get_float32_matmul_precision() == "medium"
        with full_float32():
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_factor_that_cannot_be_decomposed_keeps_its_basis_and_the_others_get_theirs():
    bad = torch.stack([torch.diag(torch.tensor([1.0, 2.0])), torch.full((2, 2), torch.nan)])
    old = torch.full((2, 2, 2), 7.0)
    with pytest.warns(UserWarning, match="eigendecomposition of a 2 x 2 factor failed"):
        basis = eigenbasis(bad, old)
    torch.testing.assert_close(basis[0].abs(), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    assert torch.equal(basis[1], old[1])
    assert torch.equal(power_iteration(bad, old)[0][1], old[1])


def with_condition(number, count=3, d=96):
    bases = torch.linalg.qr(torch.randn(2, count, d, d, dtype=torch.float64)).Q
    return (bases[0] * torch.logspace(0, -number, d, dtype=torch.float64)) @ bases[1].mT


@pytest.mark.parametrize("condition", [0, 4, 8, 12])
def test_qr_by_cholesky_matches_float64(condition):
    """Q has float32's precision at any condition number; QR in float32 is wrong from 1e7 on."""
    X = with_condition(condition).float()
    expected, Q = torch.linalg.qr(X.double()).Q, cholesky_qr(X, torch.zeros_like(X)).double()
    signed = Q * (Q * expected).sum(-2, keepdim=True).sign()
    torch.testing.assert_close(signed, expected, rtol=0, atol=2e-7)


def test_qr_by_cholesky_keeps_columns_of_zeros_and_leaves_singular_matrices_to_qr():
    X = with_condition(2).float()
    identity = torch.eye(96).repeat(3, 1, 1)
    X[0, :, 7] = X[0, 7] = 0
    X[1, :, 5] = X[1, :, 4]  # a repeated column
    Q = cholesky_qr(X, identity)
    torch.testing.assert_close(Q.mT @ Q, identity, rtol=0, atol=2e-6)
    assert torch.equal(Q[0, :, 7].abs(), identity[0, :, 7])
    torch.testing.assert_close(Q[1], torch.linalg.qr(X[1]).Q)
    for nothing in (0.0, torch.nan):
        assert torch.equal(cholesky_qr(torch.full_like(X, nothing), identity), identity)


# starts


def test_soap_that_starts_late_moves_like_adam_until_the_next_refresh():
    """For a first gradient in the middle of a run, or after a first step that a flag on the device cancelled."""
    gradients = torch.randn(4, 1, 4, 4, dtype=torch.float64)
    actual, (state,) = directions(gradients, "soap", late=7, precondition_frequency=10)
    assert not actual[0].any()
    m = v = 0.0
    for t, (direction, G) in enumerate(zip(actual[1:], gradients[1:, 0], strict=True), start=1):
        m, v = 0.95 * m + 0.05 * G, 0.95 * v + 0.05 * G**2
        expected = (1 - 0.95**t) ** -0.5 * m / (v**0.5 + 1e-8)
        torch.testing.assert_close(direction[0], expected, rtol=1e-9, atol=1e-14)
    Q = state["basis_left"]  # refreshed at the end of the eleventh step
    torch.testing.assert_close(Q.T @ Q, torch.eye(4, dtype=torch.float64))
    assert not torch.equal(Q, torch.eye(4, dtype=torch.float64))


def test_shampoo_before_the_first_refresh_is_the_graft():
    """Also if its first gradient comes late: bias corrections count the gradients of each parameter."""
    gradients = torch.randn(4, 2, 5, 3, dtype=torch.float64)
    weight = nn.Parameter(torch.zeros(5, 3).double())
    adam = torch.optim.Adam([weight], lr=1.0, betas=(0.9, 0.999))
    actual, _ = directions(gradients, "shampoo", late=3, precondition_frequency=9)
    for direction, G in zip(actual, gradients, strict=True):
        before = weight.detach().clone()
        weight.grad = G[0]
        adam.step()
        torch.testing.assert_close(direction[0], before - weight.detach())


def test_late_starts_of_kl_shampoo_do_not_depend_on_gradient_size():
    """A zero gradient does not count as a start."""
    G = torch.randn(6, 2, 5, 3, dtype=torch.float64)
    G[:2] = 0
    pairs = zip(directions(G, "kl_shampoo", late=1)[0], directions(1e3 * G, "kl_shampoo", late=1)[0], strict=True)
    bound = 3 * 15**0.5 * kl_shampoo.scale({"betas": (0.9684, 0.9482)}, 5, 3)
    for small, large in pairs:
        assert small.norm() < bound
        torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-7)


# options


def test_a_side_that_is_too_long_has_no_factor_and_one_side_must_fit():
    param = nn.Parameter(torch.randn(3, 12))
    optimizer = MuonSW([{"params": [param], "algorithm": "soap", "precondition_max_dim": 8}], lr=0.01)
    param.grad = torch.randn_like(param)
    optimizer.step()
    shapes = {key: tuple(value.shape) for key, value in optimizer.state[param].items()}
    assert shapes["basis_left"] == (3, 3)
    assert shapes["basis_right"] == shapes["factor_right"] == (1, 1)
    with pytest.raises(ValueError, match=r"precondition_max_dim=2 rotates neither side of .* a matrix of 3 x 12"):
        MuonSW([{"params": [param], "algorithm": "soap", "precondition_max_dim": 2}], lr=0.01)
    with pytest.raises(ValueError, match=r"needs matrices, but .* has shape \(3,\)"):
        MuonSW([{"params": [nn.Parameter(torch.ones(3))], "algorithm": "soap"}], lr=0.01)
