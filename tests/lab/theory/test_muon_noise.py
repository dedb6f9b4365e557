"""The bounds of Theorem 3.3 and its lemmas against Muon with noise, path by path."""

import math

import pytest
import torch

from muonsw.lab.theory.muon_noise import descent_bound, noise_floor, tracking_error_bounds, tracking_error_limit
from tests.lab.theory.brute_force import frobenius, matrix, nuclear, run_muon, scaled_decay


@pytest.mark.parametrize(("beta", "noise"), [(0.0, 0.0), (0.9, 0.0), (0.5, 0.3), (0.9, 0.3)])
def test_the_alignment_lemma_and_the_descent_inequality_hold_on_every_path(beta, noise):
    A, W, lam, r = 3 * matrix(4, 3), matrix(8, 4, 3, seed=1), 0.5, 3
    etas = [0.5 * (1 + t) ** -0.6 for t in range(200)]
    *path, end = run_muon(W, A, etas, scaled_decay(0.5), lam, beta=beta, noise=noise)
    for step in path:
        product = (step.grad * step.O).sum((-2, -1))
        assert (product >= nuclear(step.grad) - 2 * math.sqrt(r) * frobenius(step.error) - 1e-12).all()
    for chain in range(8):
        norms = [nuclear(step.grad[chain]).item() for step in path]
        bound = max(frobenius(step.W[chain]).item() for step in path)
        losses = [frobenius(step.grad[chain]).item() ** 2 / 2 for step in (path[0], end)]
        limit = descent_bound(
            etas,
            [frobenius(step.error[chain]).item() for step in path],
            f_drop=losses[0] - losses[1],
            q=lam / 0.5,
            grad_zero=frobenius(A).item(),
            L=1.0,
            r=r,
            bound=bound,
        )
        assert sum(eta * norm for eta, norm in zip(etas, norms, strict=True)) <= limit


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"f_drop": 3.0}, 3.0),
        ({"r": 4, "errors": [2.0, 4.0]}, 2 * 2 * (0.5 * 2 + 0.25 * 4) + 4e-9 * 0.3125),
        ({"q": 2.0, "grad_zero": 0.5, "bound": 14.0}, 14 * 0.3125),
        ({"L": 5.0, "r": 2}, 10 * 0.3125),
        ({"q": 2.0, "L": 3.0, "bound": 10.0}, (600 + 3) * 0.3125 + 3 * 4 * 100 * (0.5**4 + 0.25**4)),
    ],
)
def test_each_term_of_the_descent_bound(setting, expected):
    zero = {"errors": [0.0, 0.0], "f_drop": 0.0, "q": 0.0, "grad_zero": 0.0, "L": 1e-9, "r": 1, "bound": 0.0}
    assert descent_bound([0.5, 0.25], **zero | setting) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_tracking_error_stays_under_its_bound_and_reaches_its_limit(beta):
    chains, B, sigma = 400, 4, 1.2
    A, W = matrix(3, 2), torch.zeros(chains, 3, 2, dtype=torch.float64)
    etas = [0.3 * (1 + t) ** -0.9 for t in range(150)]
    *path, _ = run_muon(W, A, etas, scaled_decay(0.3), 0.1, beta=beta, noise=sigma / math.sqrt(B * 6))
    squares = torch.stack([frobenius(step.error) ** 2 for step in path])
    bounds = tracking_error_bounds(
        etas, grad_start=frobenius(A).item(), sigma=sigma, beta=beta, B=B, L=1.0, r=2, q=0.1 / 0.3, bound=10.0
    )
    five_deviations = 5 * squares.std(1) / math.sqrt(chains)
    assert (squares.mean(1) <= torch.tensor(bounds) + five_deviations).all()
    # Late in the run the error is noise alone, and independent noise averages to this over all beta.
    limit = tracking_error_limit(sigma=sigma, beta=beta, B=B)
    floor = (1 - beta) / (1 + beta) * sigma**2 / B
    assert limit == pytest.approx((1 + beta) * floor)
    assert squares[-20:].mean().item() == pytest.approx(floor, rel=0.2)
    assert noise_floor(sigma=sigma, beta=beta, r=2, B=B) == pytest.approx(2 * math.sqrt(2 * limit))


def test_the_tracking_bound_step_by_step():
    setting = {"sigma": 0.0, "beta": 0.5, "B": 1, "L": 1.0, "r": 1, "q": 0.0, "bound": 1.0}
    assert tracking_error_bounds([0.5, 0.25, 0.25], grad_start=2.0, **setting) == [1.0, 0.75, 0.4375]
