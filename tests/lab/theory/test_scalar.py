"""The closed forms of the scalar quadratic against the iteration."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsw.lab.theory.scalar import constant_decay_fixed_point, frozen_point
from tests.lab.small_experiments import SMALL

EPS = torch.finfo(torch.float64).eps
positive = st.floats(0.05, 5.0)


@given(w0=st.floats(-9, 9), a=positive, c=st.floats(-9, 9), lam=positive, shares=st.lists(st.floats(0, 1), max_size=40))
def test_frozen_point_is_the_iterate(w0, a, c, lam, shares):
    etas = [share / (a + lam) for share in shares]
    expected = w0
    for eta in etas:
        expected = expected - eta * a * (expected - c) - lam * eta * expected
    starts = torch.tensor([w0, 0.5], dtype=torch.float64)
    assert float(frozen_point(starts, etas, a=a, c=c, lam=lam)[0]) == pytest.approx(expected, abs=1000 * EPS)


def test_the_fixed_point_moves_with_the_quadratic():
    moved = replace(SMALL["scalar"], a=2.0, c=-3.0, lam=0.3, gamma=1.5, freeze_eta0=0.4)
    claims = {claim.id: claim for claim in moved.run(0).claims}
    assert claims["constant-fixed-point"].predicted == constant_decay_fixed_point(a=2.0, c=-3.0, lam=0.3)
    assert all(claim.holds for claim in claims.values())
