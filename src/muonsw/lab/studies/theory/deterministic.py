"""Muon without noise: the weighted gradient goes to zero, and on a convex objective the best iterate does too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from muonsw.lab.claims.claim import Claim, Evidence, Stated, at_most, within_share
from muonsw.lab.paper import Tolerance
from muonsw.lab.studies.experiment import Context, Experiment
from muonsw.lab.studies.theory.chains import (
    PSEUDO_HUBER,
    SCALED,
    TRUE_RULES,
    Rules,
    Stack,
    gaussian,
    jitter_loss,
    robbins_monro,
    target,
    weighted_mean,
)
from muonsw.lab.studies.theory.muon import Trajectory, watch_paths
from muonsw.theory import convex_gap_bound, muon_radius

THEOREM = "Theorem 3.3 with sigma = 0"
ASSUMED = "sigma = 0, L-smooth, iterates bounded, sum eta = infinity, sum eta^2 < infinity"


@dataclass(frozen=True)
class DeterministicSettings:
    """The quadratic for several momenta, and the pseudo-Huber loss `sum sqrt(1 + (W - A)^2) - 1`."""

    rows: int = 8
    columns: int = 16
    betas: tuple[float, ...] = (0.0, 0.5, 0.9)
    convex_beta: float = 0.5
    lam: float = 0.5
    eta0: float = 1.8
    sigma_max: float = 2.0
    steps: int = 2000
    chains: int = 4
    start_std: float = 0.02
    rules: Rules = TRUE_RULES


def run_deterministic(setting: DeterministicSettings, context: Context) -> Evidence:
    """Scaled decay on both objectives; the target is outside the ball that would hold constant decay."""
    s = setting
    etas = robbins_monro(s.steps, s.eta0, s.lam)
    A = target(s.rows, s.columns, s.sigma_max * muon_radius(s.lam), context.generator)
    starts = gaussian((s.chains, s.rows, s.columns), context.generator, std=s.start_std)
    stacks = {f"{beta:g}": Stack(SCALED, beta, A, starts) for beta in s.betas}
    stacks["convex"] = Stack(SCALED, s.convex_beta, A, starts, objective=PSEUDO_HUBER)
    paths = watch_paths(stacks, etas, s.lam, s.rules, context)
    claims = [vanishing_claim(paths[f"{beta:g}"], etas, beta, s.rows) for beta in s.betas]
    claims.append(transient_claim(paths[f"{s.betas[-1]:g}"], etas))
    return Evidence(claims + convex_claims(setting, paths["convex"], A, etas))


def vanishing_claim(path: Trajectory, etas: Sequence[float], beta: float, r: int) -> Claim:
    """The second half of the run, against hovering at the length of a step."""
    half = len(etas) // 2
    hover, late = 2.0 * r / (1.0 - beta), etas[half:]
    return at_most(
        f"vanishes-beta{beta:g}",
        f"without noise and with beta {beta:g} the eta-weighted nuclear norm falls to the size of a step",
        Stated(THEOREM, ASSUMED),
        float(weighted_mean(path.nuclear, etas, start=half).max()),
        hover * math.fsum(eta**2 for eta in late) / math.fsum(late),
        Tolerance(
            0.0, "each of r directions hovers by up to 2 eta/(1 - beta), which goes to zero with eta: an estimate"
        ),
    )


def transient_claim(path: Trajectory, etas: Sequence[float]) -> Claim:
    """How slowly the average over a whole run falls, once the gradient is gone."""
    half = len(etas) // 2
    weights = path.nuclear.new_tensor(etas).unsqueeze(1)
    sums = (weights * path.nuclear).cumsum(0).mean(1)
    totals = weights.cumsum(0).squeeze(1)
    averages = sums / totals
    return within_share(
        "transient",
        "over the whole run the average falls only as 1/S_T, like 1/log T (last over half way)",
        Stated(THEOREM, "harmonic schedule; the sum of eta |grad f|_* has converged"),
        float(averages[-1] / averages[half - 1]),
        float(totals[half - 1] / totals[-1]),
        Tolerance(0.01, "what the second half still adds to the sum"),
        limits="so the statement about whole runs is out of reach of any run; the second half is what shows it",
    )


def convex_claims(setting: DeterministicSettings, path: Trajectory, A: Tensor, etas: Sequence[float]) -> list[Claim]:
    """The best-iterate theorem, on a convex loss that is not a quadratic."""
    s = setting
    gaps, slopes = weighted_mean(path.losses[:-1], etas), weighted_mean(path.nuclear, etas)
    size = float(A.square().sum().sqrt())
    bound = convex_gap_bound(slopes, bound=float(path.norms.max()), target=size)
    initial = float(path.losses[0].mean())
    return [
        at_most(
            "convex-gap",
            "the eta-weighted loss is under (bound + |W*|_F) times the weighted nuclear norm (largest ratio)",
            Stated("proof of Theorem 3.4", "f convex, |W_t|_F <= bound"),
            float((gaps / bound).max()),
            1.0,
            Tolerance(1e-12, "rounding"),
        ),
        at_most(
            "best-iterate",
            "the best iterate of a convex loss reaches the minimum (pseudo-Huber, over the initial loss)",
            Stated("Theorem 3.4", "f convex, sigma = 0, iterates bounded"),
            float(path.losses.amin(0).max()) / initial,
            jitter_loss(s.rows, etas[-1], s.convex_beta) / initial,
            Tolerance(0.0, "steps of length eta_T make every direction hover by up to 2 eta_T/(1 - beta): an estimate"),
            limits="the theorem is about the limit inferior; a finite run shows how far down the best iterate is",
        ),
    ]


DETERMINISTIC = Experiment(
    name="muon-deterministic",
    title="Muon without noise: the gradient vanishes, and the best iterate of a convex loss reaches the minimum",
    hypotheses=("lambda > 0", "0 <= beta < 1", "sum eta = infinity", "sum eta^2 < infinity"),
    settings=DeterministicSettings(),
    function=run_deterministic,
    cost=8.0,
)
