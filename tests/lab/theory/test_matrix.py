"""The ball that holds Muon under constant decay: its bound, its floor and its projection against brute force."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muonsw.lab.theory.matrix import floor_excess, muon_norm_bounds

EPS = torch.finfo(torch.float64).eps


def matrix(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def spectral_norms(W, A, etas, phi, beta):
    """The norms along Muon on 1/2 |W - A|^2 in a few lines, without the library's optimizers."""
    M, norms = torch.zeros_like(W), [torch.linalg.matrix_norm(W, ord=2).item()]
    for eta in etas:
        M = beta * M + W - A
        U, S, Vh = torch.linalg.svd(M, full_matrices=False)
        W = (1 - phi(eta)) * W - eta * (U * (S.unsqueeze(-2) > 0)) @ Vh
        norms.append(torch.linalg.matrix_norm(W, ord=2).item())
    return norms


@pytest.mark.parametrize("beta", [0.0, 0.9])
def test_muon_obeys_the_norm_bound_at_every_step(beta):
    lam, A, W = 0.5, 8 * matrix(5, 3), 4 * matrix(5, 3, seed=1)
    etas = [1.9 * (1 + t) ** -0.7 for t in range(300)]
    norms = spectral_norms(W, A, etas, lambda eta: lam * eta, beta)
    bounds = muon_norm_bounds(norms[0], etas, lam=lam)
    assert all(z <= bound * (1 + 100 * EPS) for z, bound in zip(norms, bounds, strict=True))
    scaled = spectral_norms(W, A, etas, lambda eta: lam * eta**2 / 1.9, beta)
    assert scaled[-1] > 2 * bounds[-1]


@given(z0=st.floats(0, 50), lam=st.floats(0.05, 5.0), shares=st.lists(st.floats(0, 1), max_size=30))
def test_an_outward_push_attains_the_norm_bound(z0, lam, shares):
    z, etas = max(z0, 1 / lam), [share / lam for share in shares]
    for bound, eta in zip(muon_norm_bounds(z, etas, lam=lam), [*etas, 0.0], strict=True):
        assert z == pytest.approx(bound, rel=100 * EPS)
        z = (1 - eta * lam) * z + eta


def test_the_excess_over_the_floor_is_what_is_missing_to_the_radius():
    sigmas = torch.tensor([3.0, 1.0], dtype=torch.float64)
    # One step of eta lambda = 1/2 from zero reaches half of the radius 2: (3 - 1)^2/2 against the floor (3 - 2)^2/2.
    assert floor_excess(sigmas, [1.0], 0.5) == pytest.approx(2.0 - 0.5)
