"""ASGO: equal to a float64 reference with an exact root."""

import math

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from muonsw.algorithms.asgo import asgo, inverse_sqrt
from muonsw.algorithms.triangles import packed_shape
from muonsw.orthogonalize import POLAR_EXPRESS
from tests.family.gradients import gradient
from tests.family.references.asgo import ReferenceASGO

OPTIONS = {"betas": (0.9, 0.8), "eps": 1e-10}


def directions(gradients, **options):
    """The direction of every step from gradients (steps, count, m, n)."""
    count, m, n = gradients[0].shape
    factor = gradients[0].new_zeros(count, *packed_shape(min(m, n)))
    state = {"exp_avg": torch.zeros_like(gradients[0]), "factor": factor}
    for G in gradients:
        direction, state = asgo(OPTIONS | options, G, state)
        yield direction


@pytest.mark.parametrize(("m", "n"), [(4, 9), (8, 3), (5, 5)])
def test_it_equals_the_reference_with_an_exact_root(m, n):
    """After ten steps of the iteration eigenvalues within a factor of a million are at one, to rounding times that."""
    gradients = torch.randn(20, 3, m, n, dtype=torch.float64)
    references = [ReferenceASGO((m, n)) for _ in range(3)]
    for step, direction in enumerate(directions(gradients)):
        expected = torch.stack([reference.direction(gradients[step, i]) for i, reference in enumerate(references)])
        if step > 2:  # before that a square factor may be nearly singular
            torch.testing.assert_close(direction, expected, rtol=1e-8, atol=1e-9)


def test_the_root_is_right_over_six_decades():
    Q = torch.linalg.qr(torch.randn(3, 16, 16, dtype=torch.float64)).Q
    values = torch.logspace(0, -6, 16, dtype=torch.float64)
    expected = Q * (37 * values) ** -0.5 @ Q.mT
    found = inverse_sqrt(37 * Q * values @ Q.mT, 1e-10)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # elements of up to 164, a condition of 1e6


def test_what_is_too_small_for_ten_steps_grows_by_their_slopes():
    slopes = math.prod([*(a / 1.01 for a, _, _ in POLAR_EXPRESS[:7]), 1.875**3])
    root = inverse_sqrt(torch.diag(torch.tensor([1.0, 1e-24], dtype=torch.float64)), 0.0)
    assert root[1, 1].item() == pytest.approx(slopes / math.sqrt(1.01), rel=1e-9)


def test_without_averages_it_is_muon():
    """Both are then the polar factor of the gradient, with elements of RMS 0.2."""
    ours, muons = (nn.Parameter(gradient((4, 7), 9)) for _ in range(2))
    group = {"params": [muons], "momentum": 0.0, "nesterov": False, "orthogonalizer": "exact"}
    optimizers = [
        MuonSW([{"params": [ours], "algorithm": "asgo", "betas": (0.0, 0.0)}], lr=0.1),
        MuonSW([group], lr=0.1),
    ]
    for step in range(3):
        for param, optimizer in zip((ours, muons), optimizers, strict=True):
            param.grad = gradient((4, 7), step)
            optimizer.step()
    torch.testing.assert_close(ours, muons, rtol=1e-7, atol=1e-9)


def test_the_root_of_what_is_not_finite_is_the_identity():
    V = torch.stack([torch.eye(3), torch.full((3, 3), torch.nan)])
    root = inverse_sqrt(V, 1e-10)
    torch.testing.assert_close(root, torch.eye(3).expand(2, 3, 3), rtol=1e-5, atol=1e-6)
