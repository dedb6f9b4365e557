"""Every hypothesis against its violation, and the schedules that satisfy Robbins-Monro."""

import math
import re
from contextlib import nullcontext

import pytest
import torch

from muonsw.lab.theory.hypotheses import HypothesisError, check_rates, robbins_monro
from muonsw.lab.theory.matrix import muon_loss_floor, muon_norm_bounds
from muonsw.lab.theory.muon import noise_floor
from muonsw.lab.theory.norm import next_norm, steady_state_norm
from muonsw.lab.theory.scalar import (
    constant_decay_fixed_point,
    constant_decay_loss_gap,
    frozen_point,
    scaled_decay_error,
)
from muonsw.lab.theory.sgd import sa_constant, stationarity_bound

SCALAR = {"a": 1.0, "c": 1.0, "lam": 0.1}
HARMONIC = SCALAR | {"gamma": 2.0, "t0": 4.0}
RECURSION = {"u1": 1.0, "t1": 0.0, "alpha": 1.0, "kappa": 1.0, "gamma": 2.0, "t0": 4.0}
FLOOR = {"sigma": 1.0, "beta": 0.9, "r": 4, "B": 8}
STEP = {"s": 0.1, "phi": 0.01, "a": 0.0}
SMOOTH = {"f_gap": 1.0, "L": 1.0, "q": 0.1, "sigma": 0.0, "bound": 1.0}


@pytest.mark.parametrize(
    ("function", "arguments", "settings", "change", "hypothesis"),
    [
        (constant_decay_fixed_point, (), SCALAR, {"lam": math.nan}, "lambda > 0"),
        (constant_decay_loss_gap, (), SCALAR, {"a": -1.0}, "a > 0"),
        (frozen_point, (torch.zeros(1), [0.5, 0.95]), SCALAR, {}, "eta <= 1/(a + lambda)"),
        (frozen_point, (torch.zeros(1), [-0.5]), SCALAR, {}, "eta >= 0"),
        (scaled_decay_error, (10,), HARMONIC, {"gamma": 1.0}, "a*gamma > 1"),
        (muon_norm_bounds, (1.0, [0.5, 11.0]), {"lam": 0.1}, {}, "eta*lambda <= 1"),
        (muon_loss_floor, ([1.0],), {"lam": 0.1}, {"lam": -0.1}, "lambda > 0"),
        (stationarity_bound, ([0.3],), SMOOTH, {}, "eta <= 1/(4*L*rho)"),
        (sa_constant, (), RECURSION, {"gamma": 1.0}, "alpha*gamma > 1"),
        (sa_constant, (), RECURSION, {"t0": 1.0}, "alpha*eta <= 1"),
        (noise_floor, (), FLOOR, {"sigma": -1.0}, "sigma >= 0"),
        (noise_floor, (), FLOOR, {"beta": 1.0}, "0 <= beta < 1"),
        (next_norm, (1.0,), STEP, {"phi": 1.5}, "0 <= phi <= 1"),
        (next_norm, (1.0,), STEP, {"a": 1.5}, "-1 <= a <= 1"),
        (
            steady_state_norm,
            (),
            {name: torch.tensor(x) for name, x in STEP.items()},
            {"phi": torch.zeros(())},
            "phi > 0",
        ),
    ],
)
def test_a_violated_hypothesis_is_named(function, arguments, settings, change, hypothesis):
    if change:
        function(*arguments, **settings)
    with pytest.raises(HypothesisError, match=re.escape(f"hypothesis {hypothesis} does")):
        function(*arguments, **settings | change)


@pytest.mark.parametrize("p", [0.0, 0.5, 0.6, 1.0, 1.1])
def test_robbins_monro_agrees_with_the_condensation_test(p):
    def converges(exponent):
        """A series of decreasing terms converges as the sum over 2^k eta(2^k) does, which is geometric."""
        return 2.0 ** (1 - exponent) < 1.0

    holds = not converges(p) and converges(2 * p)
    with nullcontext() if holds else pytest.raises(HypothesisError, match="sum eta"):
        assert robbins_monro(5, 0.3, p)[3] == pytest.approx(0.3 * 4**-p)


def test_rates_may_be_zero_and_equal_to_their_limit_up_to_rounding():
    limit = 1.0 / 3.0
    assert check_rates(torch.tensor([0.0, 0.25]), {"eta <= 1/3": limit}) == [0.0, 0.25]
    check_rates([limit * (1 + 1e-15)], {"eta <= 1/3": limit})
    with pytest.raises(HypothesisError, match="eta <= 1/3"):
        check_rates([limit * (1 + 1e-9)], {"eta <= 1/3": limit})
