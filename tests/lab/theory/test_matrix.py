"""The ball that holds Muon under constant decay: its exact bound and its floor; runs obey both in `test_theory.py`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsw.lab.theory.matrix import floor_excess, muon_norm_bounds


@given(z0=st.floats(0, 50), lam=st.floats(0.05, 5.0), shares=st.lists(st.floats(0, 1), max_size=30))
def test_an_outward_push_attains_the_norm_bound(z0, lam, shares):
    z, etas = max(z0, 1 / lam), [share / lam for share in shares]
    for bound, eta in zip(muon_norm_bounds(z, etas, lam=lam), [*etas, 0.0], strict=True):
        assert z == pytest.approx(bound, rel=100 * torch.finfo(torch.float64).eps)
        z = (1 - eta * lam) * z + eta


def test_the_excess_over_the_floor_is_what_is_missing_to_the_radius():
    sigmas = torch.tensor([3.0, 1.0], dtype=torch.float64)
    # One step of eta lambda = 1/2 from zero reaches half of the radius 2: (3 - 1)^2/2 against the floor (3 - 2)^2/2.
    assert floor_excess(sigmas, [1.0], 0.5) == pytest.approx(2.0 - 0.5)
