"""The ball that holds Muon under constant decay: its bound, its floor and its projection against brute force."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsw.lab.theory.matrix import clip_projection, floor_excess, log_extremes, muon_loss_floor, muon_norm_bounds
from tests.lab.theory.brute_force import (
    EPS,
    constant_decay,
    frobenius,
    matrix,
    nuclear,
    polar,
    run_muon,
    scaled_decay,
    spectral,
)


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_muon_obeys_the_norm_bound_at_every_step(beta):
    lam, A, W = 0.5, 8 * matrix(5, 3), 4 * matrix(5, 3, seed=1)
    etas = [1.9 * (1 + t) ** -0.7 for t in range(300)]
    bounds = muon_norm_bounds(spectral(W), etas, lam=lam)
    norms = [spectral(step.W) for step in run_muon(W, A, etas, constant_decay, lam, beta=beta)]
    assert all(z <= bound * (1 + 100 * EPS) for z, bound in zip(norms, bounds, strict=True))
    scaled = [spectral(step.W) for step in run_muon(W, A, etas, scaled_decay(1.9), lam, beta=beta)]
    assert scaled[-1] > 2 * bounds[-1]


@given(z0=st.floats(0, 50), lam=st.floats(0.05, 5.0), shares=st.lists(st.floats(0, 1), max_size=30))
def test_an_outward_push_attains_the_norm_bound(z0, lam, shares):
    z, etas = max(z0, 1 / lam), [share / lam for share in shares]
    for bound, eta in zip(muon_norm_bounds(z, etas, lam=lam), [*etas, 0.0], strict=True):
        assert z == pytest.approx(bound, rel=100 * EPS)
        z = (1 - eta * lam) * z + eta


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_constant_decay_meets_the_loss_floor_from_above_and_scaled_goes_through_it(beta):
    lam, sigmas = 0.1, torch.tensor([20.0, 14.0, 11.0, 4.0], dtype=torch.float64)
    A = polar(matrix(6, 4)) @ torch.diag(sigmas)
    etas = [9.0 / (1 + t) for t in range(2000)]
    floor = muon_loss_floor(sigmas, lam=lam)
    assert floor == pytest.approx((10**2 + 4**2 + 1**2) / 2)
    *_, constant = run_muon(0.02 * matrix(6, 4, seed=1), A, etas, constant_decay, lam, beta=beta)
    *_, scaled = run_muon(0.02 * matrix(6, 4, seed=1), A, etas, scaled_decay(9.0), lam, beta=beta)
    # A start inside the radius stays inside, so the floor holds at every step.
    assert floor * (1 - 1e-9) < frobenius(constant.grad).item() ** 2 / 2 < 1.01 * floor
    assert frobenius(scaled.grad).item() ** 2 / 2 < 1e-3 * floor
    assert muon_loss_floor([9.0, 1.0], lam=lam) == 0.0  # a target inside the ball


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (2, 3, 5)])
def test_clipping_is_the_projection_onto_the_ball(shape):
    A, radius = 2 * matrix(*shape), 1.3
    P = clip_projection(A, radius)
    assert torch.linalg.matrix_norm(P, ord=2).max().item() <= radius * (1 + 100 * EPS)
    # Optimal: P attains radius |A - P|_*, the largest product that a W of the ball has with A - P.
    torch.testing.assert_close(((A - P) * P).sum((-2, -1)), radius * nuclear(A - P), rtol=1e-12, atol=1e-12)
    sigmas = torch.linalg.svdvals(A)
    distance = frobenius(A - P) ** 2 / 2
    for floor, sigma in zip(distance.reshape(-1).tolist(), sigmas.reshape(-1, sigmas.shape[-1]), strict=True):
        assert muon_loss_floor(sigma, lam=1 / radius) == pytest.approx(floor, rel=1e-12)


def test_the_excess_over_the_floor_is_what_is_missing_to_the_radius():
    sigmas = torch.tensor([3.0, 1.0], dtype=torch.float64)
    # One step of eta lambda = 1/2 from zero reaches half of the radius 2: (3 - 1)^2/2 against the floor (3 - 2)^2/2.
    assert floor_excess(sigmas, [1.0], 0.5) == pytest.approx(2.0 - 0.5)


def test_thinning_keeps_ends_and_extremes():
    values = torch.rand(3, 5000, dtype=torch.float64)
    values[1, 777], values[2, 4321] = -5.0, 9.0
    steps, kept = log_extremes(values, 50)
    assert {1, 778, 4322, 5000} <= set(steps)
    assert len(steps) <= 4 * 50
    assert kept[1] == [float(values[1, step - 1]) for step in steps]
