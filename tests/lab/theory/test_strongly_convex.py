"""Lemma D.1 and the bound of Theorem 3.2 against the recursion and against exact moments."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsw.lab.theory import HypothesisError
from muonsw.lab.theory.strongly_convex import first_contracting_step, sa_constant, strongly_convex_kappa
from tests.lab.theory.brute_force import constant_decay, harmonic, mean_squared_distances, scaled_decay


@given(
    alpha=st.floats(0.05, 5.0),
    kappa=st.floats(0, 10),
    ratio=st.floats(1.05, 6),
    u1=st.floats(1e-9, 100),
    t1=st.integers(0, 9),
)
def test_the_recursion_stays_under_nu_over_t(alpha, kappa, ratio, u1, t1):
    gamma, t0 = ratio / alpha, ratio + 0.5
    nu, u = sa_constant(u1=u1, t1=t1, alpha=alpha, kappa=kappa, gamma=gamma, t0=t0), u1
    for t in range(t1, 200):
        assert u <= nu / (t + t0) * (1 + 1e-12)
        eta = gamma / (t + t0)
        u = (1 - alpha * eta) * u + kappa * eta**2


def test_a_pull_of_first_order_breaks_the_recursion_bound():
    u, nu = 1.0, sa_constant(u1=1.0, t1=0, alpha=1.0, kappa=1.0, gamma=2.0, t0=4.0)
    for eta in harmonic(2.0, 4.0, 400):
        u = (1 - eta) * u + 0.5 * eta  # as constant decay pulls
    assert u > 10 * nu / 404


@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_the_rate_bounds_scaled_decay_only(sigma):
    gamma, t0, lam, steps = 2.0, 8.0, 0.4, 4000
    h = torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64)
    x_star = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64)
    setting = {"mu": 1.0, "L": 2.0, "q": lam * t0 / gamma, "rho": 1.0}
    t1 = first_contracting_step(gamma=gamma, t0=t0, **setting)
    kappa = strongly_convex_kappa(gamma / (t1 + t0), sigma=sigma, x_star=3.0, **setting)

    def within(rule):
        u = mean_squared_distances(harmonic(gamma, t0, steps), rule, lam, h, x_star, sigma)
        nu = sa_constant(u1=u[t1], t1=t1, alpha=1.0, kappa=kappa, gamma=gamma, t0=t0)
        return [u[t] <= nu / (t + t0) for t in range(t1, steps, 37)]

    assert all(within(scaled_decay(gamma / t0)))
    assert not any(within(constant_decay)[50:])


@given(
    x=st.floats(-9, 9),
    x_star=st.floats(-9, 9),
    sigma=st.floats(0, 3),
    q=st.floats(0, 4),
    share=st.floats(0, 1),
)
def test_kappa_bounds_a_single_step(x, x_star, sigma, q, share):
    eta = share / 4  # with mu = L = 1 small enough for all these q: K1 eta + K2 eta^3 <= 1
    e = x - x_star
    after = (x - eta * e - q * eta**2 * x - x_star) ** 2 + eta**2 * sigma**2
    kappa = strongly_convex_kappa(eta, mu=1.0, L=1.0, q=q, sigma=sigma, x_star=abs(x_star))
    assert after <= (1 - eta) * e**2 + kappa * eta**2 + 1e-12


def test_constants_by_hand():
    recursion = {"t1": 0, "alpha": 1.0, "gamma": 2.0, "t0": 4.0}
    assert sa_constant(u1=1.0, kappa=3.0, **recursion) == 3.0 * 2.0**2
    assert sa_constant(u1=5.0, kappa=3.0, **recursion) == 4.0 * 5.0
    assert strongly_convex_kappa(0.25, mu=1.0, L=1.0, q=1.0, sigma=0.5, x_star=2.0) == 0.5 + 4.0 * 1.25
    # K1 = 2 * 4 - 0.4 and eta = 2/16: 0.95 + 0.001 <= 1, while 2/15 gives 1.01.
    assert first_contracting_step(gamma=2.0, t0=8.0, mu=1.0, L=2.0, q=0.4) == 8


def test_the_first_contracting_step_is_the_first():
    setting = {"mu": 1.0, "L": 2.0, "q": 0.4, "rho": 1.5}
    t1 = first_contracting_step(gamma=2.0, t0=8.0, **setting)
    strongly_convex_kappa(2.0 / (t1 + 8.0), sigma=1.0, x_star=1.0, **setting)
    with pytest.raises(HypothesisError, match="K1"):
        strongly_convex_kappa(2.0 / (t1 + 7.0), sigma=1.0, x_star=1.0, **setting)
