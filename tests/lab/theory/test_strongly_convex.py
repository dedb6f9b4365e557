"""Lemma D.1 and the bound of Theorem 3.2 against the recursion and against exact moments."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muonsw.lab.theory import HypothesisError
from muonsw.lab.theory.strongly_convex import first_contracting_step, sa_constant, strongly_convex_kappa


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
