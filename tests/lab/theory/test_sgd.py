"""The constants of Theorem 3.1 and Lemma D.1 by hand, and the rippled bowl against autograd."""

import pytest
import torch

from muonsw.lab.theory.sgd import ripple_gradient, ripple_loss, sa_constant, stationarity_bound


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


def test_the_constant_of_the_recursion_by_hand():
    recursion = {"t1": 0, "alpha": 1.0, "gamma": 2.0, "t0": 4.0}
    assert sa_constant(u1=1.0, kappa=3.0, **recursion) == 3.0 * 2.0**2
    assert sa_constant(u1=5.0, kappa=3.0, **recursion) == 4.0 * 5.0
