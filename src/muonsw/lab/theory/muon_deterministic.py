"""Theorem 3.4, and Theorem 3.3 with sigma = 0: without noise Muon with scaled decay reaches the minimum."""

from __future__ import annotations

from dataclasses import dataclass

from muonsw.lab.paper import Tolerance
from muonsw.lab.stats import Claim, Evidence, Source, at_most, within_share
from muonsw.lab.theory.chains import SCALED
from muonsw.lab.theory.experiment import Context, Experiment
from muonsw.lab.theory.muon_chains import (
    HOVERING,
    MuonRun,
    Stack,
    Trajectory,
    follow,
    frobenius_norm,
    hover_gradient,
    hover_loss,
    weighted_mean,
)


@dataclass(frozen=True)
class DeterministicSettings(MuonRun):
    """The quadratic for several momenta, and the pseudo-Huber loss `sum sqrt(1 + (W - A)^2) - 1`."""

    rows: int = 8
    columns: int = 16
    betas: tuple[float, ...] = (0.0, 0.5, 0.9)
    convex_beta: float = 0.5


def run_deterministic(s: DeterministicSettings, context: Context) -> Evidence:
    """Scaled decay on both objectives; the target is outside the ball that would hold constant decay."""
    A, starts = s.draw(s.chains, s.rows, s.columns, context.generator)
    stacks = {f"{beta:g}": Stack(SCALED, beta, A, starts) for beta in s.betas}
    stacks["convex"] = Stack(SCALED, s.convex_beta, A, starts, huber=True)
    paths, half, claims = follow(stacks, s, context), s.steps // 2, list[Claim]()

    # The second half of the run, against hovering at the length of a step.
    no_noise = "sigma = 0, L-smooth, iterates bounded, sum eta = infinity, sum eta^2 < infinity"
    theorem = Source("Theorem 3.3 with sigma = 0", no_noise)
    estimate = "each of r directions hovers by up to 2 eta/(1 - beta), which goes to zero with eta: an estimate"
    for beta in s.betas:
        path = paths[f"{beta:g}"]
        bound = hover_gradient(path.stack.rank, s.etas[half:], beta)
        late = float(weighted_mean(path.nuclear, s.etas, start=half).max())
        falls = f"without noise and with beta {beta:g} the eta-weighted nuclear norm falls to the size of a step"
        claims.append(at_most(f"vanishes-beta{beta:g}", falls, theorem, late, bound, Tolerance(0.0, estimate)))

    # How slowly the average over a whole run falls, once the gradient is gone.
    nuclear = paths[f"{s.betas[-1]:g}"].nuclear
    weights = nuclear.new_tensor(s.etas).unsqueeze(1)
    sums, totals = (weights * nuclear).cumsum(0).mean(1), weights.cumsum(0).squeeze(1)
    averages = sums / totals
    ratio, predicted = float(averages[-1] / averages[half - 1]), float(totals[half - 1] / totals[-1])
    harmonic = Source(theorem.reference, "harmonic schedule; the sum of eta |grad f|_* has converged")
    slowly = "over the whole run the average falls only as 1/S_T, like 1/log T (last over half way)"
    limits = "so the statement about whole runs is out of reach of any run; the second half is what shows it"
    added = Tolerance(0.01, "what the second half still adds to the sum")
    claims.append(within_share("transient", slowly, harmonic, ratio, predicted, added, limits=limits))
    return Evidence(claims + convex_claims(paths["convex"], s))


def convex_claims(path: Trajectory, s: DeterministicSettings) -> list[Claim]:
    """Theorem 3.4 on a convex loss that is not a quadratic: `f(W) - f(W*) <= |grad f(W)|_* (bound + |W*|_F)`."""
    initial = float(path.losses[0].mean())
    gaps, slopes = weighted_mean(path.losses[:-1], s.etas), weighted_mean(path.nuclear, s.etas)
    bound = slopes * (float(path.norms.max()) + float(frobenius_norm(path.stack.A)))
    ratio, lowest = float((gaps / bound).max()), float(path.losses.amin(0).max()) / initial
    hovering = hover_loss(path.stack.rank, s.etas[-1], path.stack.beta) / initial

    proof = Source("proof of Theorem 3.4", "f convex, |W_t|_F <= bound")
    theorem = Source("Theorem 3.4", "f convex, sigma = 0, iterates bounded")
    under = "the eta-weighted loss is under (bound + |W*|_F) times the weighted nuclear norm (largest ratio)"
    reaches = "the best iterate of a convex loss reaches the minimum (pseudo-Huber, over the initial loss)"
    limits = "the theorem is about the limit inferior; a finite run shows how far down the best iterate is"
    return [
        at_most("convex-gap", under, proof, ratio, 1.0, Tolerance(1e-12, "rounding")),
        at_most("best-iterate", reaches, theorem, lowest, hovering, HOVERING, limits=limits),
    ]


DETERMINISTIC = Experiment(
    name="muon-deterministic",
    title="Muon without noise: the gradient vanishes, and the best iterate of a convex loss reaches the minimum",
    hypotheses=("lambda > 0", "0 <= beta < 1", "sum eta = infinity", "sum eta^2 < infinity"),
    settings=DeterministicSettings(),
    function=run_deterministic,
    cost=8.0,
)
