"""Promises of every algorithm under every decay rule and orthogonalizer, including ones added later."""

import pytest
import torch
from torch import nn

from muonsw import ALGORITHMS, DECAY_RULES, NORMALIZERS, PRECONDITIONERS, MuonSW
from muonsw.orthogonalize import ORTHOGONALIZERS
from tests.common import toy
from tests.common.problems import RULE_OPTIONS, cosine, matrices, mean_square, phi_of, run

LAMBDA = {"squared": 0.5, "independent": 0.002, "fixed": 1e-4, "gradient_norm": 1e-4}
# `slot=member` chooses a member of a slot instead of an orthogonalizer.
CHOICES = [name for name in ORTHOGONALIZERS if name != "newton_schulz"]
CHOICES += [f"precondition={member}" for member in PRECONDITIONERS] + [f"normalize={member}" for member in NORMALIZERS]
# Every algorithm with every rule; every orthogonalizer with two, because rules and orthogonalizers share no code.
# Cautious decay alternates.
COMBINATIONS = [
    (algorithm, decay, orthogonalizer, (row + column) % 2 == 1)
    for row, (algorithm, orthogonalizer) in enumerate(
        [(name, "newton_schulz") for name in (*ALGORITHMS, "toy")] + [("muon", choice) for choice in CHOICES]
    )
    for column, decay in enumerate(DECAY_RULES if orthogonalizer == "newton_schulz" else ("constant", "scaled"))
]
# Decay that does not vanish with the learning rate, or grows as gradients vanish, pulls away from a minimum.
PULLING = ("fixed", "gradient_norm")
NAMES = ("algorithm", "decay", "orthogonalizer", "cautious")


def is_quick(algorithm, decay, orthogonalizer, _):
    """Long runs of all combinations take minutes, and rules do not depend on the algorithm."""
    return decay == "scaled" or (algorithm in ("muon", "adamw") and orthogonalizer == "newton_schulz")


runs = pytest.mark.parametrize(
    NAMES, [pytest.param(*case, marks=() if is_quick(*case) else pytest.mark.slow) for case in COMBINATIONS]
)


@pytest.fixture(autouse=True, scope="module")
def _toy():
    ALGORITHMS.register("toy", toy.TOY)
    yield
    del ALGORITHMS["toy"]


def build(params, algorithm, decay, orthogonalizer, cautious, lr=0.05):
    slot, _, member = orthogonalizer.partition("=")
    chosen = {slot: member} if member else {"orthogonalizer": orthogonalizer}
    chosen |= {"momentum": 0.9, "fraction": 0.75}  # with 0.25, Dion2 would remember gradients four times as long
    options = {key: value for key, value in chosen.items() if key in ALGORITHMS[algorithm].defaults}
    group = {"params": params, "algorithm": algorithm, **options}
    return MuonSW(
        [group],
        lr=lr,
        weight_decay=LAMBDA.get(decay, 0.1),
        decay=decay,
        cautious=cautious,
        ns_dtype="float32",
        **RULE_OPTIONS.get(decay, {}),
    )


@runs
def test_it_finds_the_minimum_of_a_quadratic(algorithm, decay, orthogonalizer, cautious):
    # Muon moves singular values by at most 0.2 sqrt(6) times the sum of the rates, 3.7: a target of norm one is near
    target = torch.randn(6, 4)
    target /= torch.linalg.matrix_norm(target, 2)
    param = nn.Parameter(torch.zeros(6, 4))
    optimizer = build([param], algorithm, decay, orthogonalizer, cautious)
    schedule = cosine(0.05, 300, final=0.0)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = schedule(step)
        optimizer.zero_grad()
        (param - target).square().sum().backward()
        optimizer.step()
    # constant decay stops short of the target, by at most lambda / 20 if momentum amplifies the gradient tenfold
    short = 0.1 / 20 if decay in ("constant", "independent", "cosine") else 0.0
    short = 0.02 if decay in PULLING else short
    # whitening amplifies the rounding of a gradient without noise, which then opposes decay less
    short = 0.1 if short and "soap" in orthogonalizer else short
    assert (param.detach() - target).norm() < (short + 0.002) * target.norm()


@pytest.mark.parametrize(NAMES, COMBINATIONS)
def test_decay_is_the_rules_and_nothing_else(algorithm, decay, orthogonalizer, cautious):
    """Two weights that see the same gradients differ by the decay alone: an exact identity for each entry."""
    shared = {"algorithm": algorithm, "orthogonalizer": orthogonalizer, "cautious": cautious}
    decayed, free = matrices((4, 6), dtype=torch.float64), matrices((4, 6), dtype=torch.float64)
    lr, peak = 0.02, 0.05
    with_decay = build(decayed, decay=decay, lr=peak, **shared)
    without = build(free, decay="none", lr=peak, **shared)
    for optimizer, params in ((with_decay, decayed), (without, free)):
        optimizer.param_groups[0]["lr"] = lr
        run(optimizer, params, 1)
    lam = LAMBDA.get(decay, 0.1)
    phi = phi_of(decay, lam, lr, peak, 1, [mean_square(decayed)])
    start = matrices((4, 6), dtype=torch.float64)[0].detach()
    inward = (start - free[0].detach()) * start >= 0
    mask = inward.double() if cautious else torch.ones_like(start)
    expected = free[0].detach() - phi * mask * start
    torch.testing.assert_close(decayed[0].detach(), expected, rtol=1e-12, atol=1e-14)
