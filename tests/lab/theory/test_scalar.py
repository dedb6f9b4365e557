"""The closed forms of the scalar quadratic against the iteration."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsw.lab.theory.scalar import (
    constant_decay_fixed_point,
    constant_decay_loss_gap,
    frozen_point,
    scaled_decay_error,
)
from tests.lab.small_experiments import SMALL, smaller
from tests.lab.theory.brute_force import EPS, constant_decay, descend, harmonic, scaled_decay

positive = st.floats(0.05, 5.0)


@given(w0=st.floats(-9, 9), a=positive, c=st.floats(-9, 9), lam=positive, shares=st.lists(st.floats(0, 1), max_size=40))
def test_frozen_point_is_the_iterate(w0, a, c, lam, shares):
    etas = [share / (a + lam) for share in shares]
    expected = descend(w0, etas, constant_decay, a, c, lam)
    assert frozen_point(w0, etas, a=a, c=c, lam=lam) == pytest.approx(expected, abs=1000 * EPS)
    starts = torch.tensor([w0, 0.5], dtype=torch.float64)
    assert float(frozen_point(starts, etas, a=a, c=c, lam=lam)[0]) == pytest.approx(expected, abs=1000 * EPS)


@pytest.mark.parametrize("w0", [-5.0, 7.0])
def test_only_constant_decay_settles_at_its_fixed_point(w0):
    a, c, lam = 0.8, 1.5, 0.3
    etas = [0.9 * (1 + t) ** -0.6 for t in range(5000)]  # forgets the start by exp(-1.1 * 66)
    wbar, gap = constant_decay_fixed_point(a=a, c=c, lam=lam), constant_decay_loss_gap(a=a, c=c, lam=lam)
    constant = descend(w0, etas, constant_decay, a, c, lam)
    scaled = descend(w0, etas, scaled_decay(0.9), a, c, lam)
    assert constant == pytest.approx(wbar, rel=100 * EPS)
    assert a / 2 * (constant - c) ** 2 == pytest.approx(gap, rel=1000 * EPS)
    assert abs(scaled - wbar) > 0.9 * abs(c - wbar)
    assert a / 2 * (scaled - c) ** 2 < 1e-3 * gap


@pytest.mark.parametrize(("a", "c", "lam", "gamma", "t0"), [(1.0, 1.0, 0.1, 2.0, 4.0), (2.0, -3.0, 0.5, 1.5, 10.0)])
def test_scaled_error_leads_and_constant_decay_does_not_have_it(a, c, lam, gamma, t0):
    def relative(steps):
        w = descend(0.0, harmonic(gamma, t0, steps), scaled_decay(gamma / t0), a, c, lam)
        return abs((c - w) / scaled_decay_error(steps, a=a, c=c, lam=lam, gamma=gamma, t0=t0) - 1)

    # What is left out is one order smaller, so ten times the steps give a tenth of it.
    assert relative(100_000) < 0.01
    assert relative(100_000) < 0.15 * relative(10_000)
    constant = descend(0.0, harmonic(gamma, t0, 10_000), constant_decay, a, c, lam)
    assert abs(c - constant) > 50 * abs(scaled_decay_error(10_000, a=a, c=c, lam=lam, gamma=gamma, t0=t0))


def test_the_fixed_point_moves_with_the_quadratic():
    moved = smaller(SMALL["scalar"], a=2.0, c=-3.0, lam=0.3, gamma=1.5, freeze_eta0=0.4)
    claims = {claim.id: claim for claim in moved.run(0).claims}
    assert claims["constant-fixed-point"].predicted == constant_decay_fixed_point(a=2.0, c=-3.0, lam=0.3)
    assert all(claim.holds for claim in claims.values())
