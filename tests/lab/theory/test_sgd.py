"""The bounds of Theorems 3.1 and 3.2 and Lemma D.1 against exact moments, and the rippled bowl against autograd."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsw.lab.theory.sgd import (
    first_contracting_step,
    ripple_gradient,
    ripple_loss,
    sa_constant,
    stationarity_bound,
    strongly_convex_kappa,
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"f_gap": 3.0}, 6.0),
        ({"sigma": 3.0, "L": 0.5}, 9 * (0.5**2 + 0.25**2)),
        ({"q": 2.0, "bound": 5.0, "L": 0.5}, 200 * (0.5**3 + 0.25**3 + 0.5 * (0.5**4 + 0.25**4))),
    ],
)
def test_each_term_of_the_stationarity_bound(settings, expected):
    zero = {"f_gap": 0.0, "L": 1e-9, "q": 0.0, "sigma": 0.0, "bound": 0.0}
    assert stationarity_bound([0.5, 0.25], **zero | settings) == pytest.approx(expected, abs=1e-6)


def test_the_rippled_bowl_has_its_derivatives_and_several_wells():
    y = torch.linspace(-4.0, 4.0, 801, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(ripple_loss(y).sum(), y, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), y)
    assert torch.allclose(slope, ripple_gradient(y))
    assert curvature.max() <= 1.0
    signs = ripple_gradient(y.detach()).sign()
    assert int((signs[1:] > signs[:-1]).sum()) >= 3


@given(x=st.floats(-9, 9), x_star=st.floats(-9, 9), sigma=st.floats(0, 3), q=st.floats(0, 4), share=st.floats(0, 1))
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
