"""The recursion of the norm against matrices, and its steady state against the recursion."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsw.lab import theory
from tests.lab.theory.brute_force import EPS, matrix, polar


def leading_order(r, s, phi, a):
    """The recursion without products of phi with phi or s."""
    return math.sqrt((1 - 2 * phi) * r**2 - 2 * s * a * r + s**2)


def test_the_recursion_follows_real_matrices():
    W, phi, eta = matrix(6, 4), 0.01, 0.3
    direction = polar(matrix(6, 4, seed=1))
    s = eta * 0.2  # 0.2 sqrt(max(m, n)) makes the RMS of an orthogonal update 0.2
    a = ((W * direction).sum() / W.norm() / direction.norm()).item()
    after = (1 - phi) * W - 0.2 * math.sqrt(6) * eta * direction
    predicted = theory.next_norm(W.norm().item() / math.sqrt(24), s=s, phi=phi, a=a)
    assert predicted == pytest.approx(after.norm().item() / math.sqrt(24), rel=1e-13)


@given(s=st.floats(1e-5, 1e-2), phi=st.floats(1e-8, 1e-2), a=st.floats(-0.7, 0.7))
def test_the_steady_state_is_the_fixed_point_for_either_sign(s, phi, a):
    r_star = theory.steady_state_norm(s=s, phi=phi, a=a)
    assert leading_order(r_star, s, phi, a) == pytest.approx(r_star, rel=1e-12)


def test_a_strong_inward_push_does_not_cancel():
    s, phi, a = 1e-3, 1e-20, 0.5
    assert theory.steady_state_norm(s=s, phi=phi, a=a) == pytest.approx(s / (2 * a), rel=4 * EPS)
    assert s / (2 * phi) * (-a + math.sqrt(a * a + 2 * phi)) == 0.0  # the textbook root


@pytest.mark.parametrize("a", [-0.02, 0.0, 0.02])
def test_both_relaxation_times_are_those_of_the_recursion(a):
    s, phi = 1e-3, 5e-4
    r_star = theory.steady_state_norm(s=s, phi=phi, a=a)

    def measured(alignment):
        """Steps per e-fold of a small displacement."""
        r = first = r_star * (1 + 1e-6)
        for _ in range(100):
            r = leading_order(r, s, phi, alignment(r))
        return 100 / math.log((first - r_star) / (r - r_star))

    following, fixed = measured(lambda r: a * r_star / r), measured(lambda _: a)
    tau, tau_fixed = theory.relaxation_times(s=s, phi=phi, r_star=r_star)
    # A step of a recursion with multiplier 1 - x decays by -log(1 - x) = x + x^2/2.
    assert following == pytest.approx(tau, rel=phi + 1e-4)
    assert fixed == pytest.approx(tau_fixed, rel=1 / tau_fixed + 1e-4)
    assert (tau_fixed > following * 1.1, tau_fixed < following / 1.1) == (a < 0, a > 0)


@pytest.mark.parametrize("eta", [4.8e-3, 4.8e-4, 4.8e-8])
def test_scaled_limit_holds_at_every_rate_and_constant_one_only_at_zero(eta):
    lam, eta_max, k, a0 = 0.1, 4.8e-3, 20.8, 7.4e-3
    scaled = theory.steady_state_norm(s=0.2 * eta, phi=lam * eta**2 / eta_max, a=-k * eta)
    assert scaled == pytest.approx(theory.scaled_decay_norm_limit(lam=lam, eta_max=eta_max, k=k), rel=1e-12)
    constant = theory.steady_state_norm(s=0.2 * eta, phi=lam * eta, a=-a0 - 40.5 * eta)
    limit = theory.constant_decay_norm_limit(lam=lam, a0=a0)
    assert constant > limit
    # To first order sqrt(a^2 + 2 lambda eta) adds lambda eta / a, and the slope of the fit 40.5 eta.
    excess = (40.5 * eta + lam * eta / (2 * a0)) / a0
    assert eta > 1e-6 or constant == pytest.approx(limit * (1 + excess), rel=1e-7)


def test_steady_state_functions_are_elementwise_on_tensors():
    s, phi, a = (torch.tensor(x, dtype=torch.float64) for x in ([1e-3, 2e-3], [1e-4, 5e-4], [-0.01, 0.02]))
    rows = list(zip(s.tolist(), phi.tolist(), a.tolist(), strict=True))
    expected = [theory.steady_state_norm(s=x, phi=y, a=z) for x, y, z in rows]
    assert theory.steady_state_norm(s=s, phi=phi, a=a).tolist() == pytest.approx(expected, rel=4 * EPS)
    with pytest.raises(theory.HypothesisError, match="phi > 0"):
        theory.steady_state_norm(s=s, phi=torch.tensor([1e-4, 0.0]), a=a)
