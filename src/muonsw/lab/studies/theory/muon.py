"""Stochastic Muon with scaled decay: the noise floor, the lemmas behind it, and the limit without noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from muonsw.lab.claims.claim import Claim, Comparison, Outcome
from muonsw.lab.claims.statistics import t_interval
from muonsw.lab.studies.experiment import Context, Experiment
from muonsw.lab.studies.theory.chains import CONSTANT, SCALED, gaussian
from muonsw.lab.studies.theory.lemmas import (
    ASSUMED,
    MuonSettings,
    alignment_claim,
    by_batch,
    descent_claim,
    settled_claims,
    tracking_claim,
)
from muonsw.lab.studies.theory.paths import Path, Stack, descend, weighted_mean
from muonsw.lab.studies.theory.quadratic import target
from muonsw.theory import (
    PowerLaw,
    check_schedule,
    muon_radius,
    noise_floor,
)
from muonsw.theory.hypotheses import require_noise


def schedule(steps: int, eta0: float, lam: float) -> list[float]:
    """Harmonic learning rates, after a check of every hypothesis they must satisfy."""
    law = PowerLaw(eta0, 1.0)
    law.require_robbins_monro()
    etas = [law(t) for t in range(steps)]
    check_schedule(etas, lam=lam).require()
    return etas


def run_muon(setting: MuonSettings, context: Context) -> Outcome:
    """Scaled decay over the whole grid, and constant decay at the largest momentum for contrast."""
    s, stacks = setting, dict[str, Stack]()
    require_noise(s.sigma)
    etas = schedule(s.steps, s.eta0, s.lam)
    for rank in s.ranks:
        A = target(rank, 2 * rank, s.sigma_max * muon_radius(s.lam), context.generator)
        starts = gaussian((len(s.batches) * s.chains, rank, 2 * rank), context.generator, std=s.start_std)
        sizes = torch.tensor(s.batches, dtype=torch.float64).repeat_interleave(s.chains)
        noise = s.sigma / (sizes * A.numel()).sqrt()
        for beta in s.betas:
            stacks[f"{SCALED}/{beta:g}/{rank}"] = Stack(SCALED, beta, A, starts, noise)
        stacks[f"{CONSTANT}/{s.betas[-1]:g}/{rank}"] = Stack(CONSTANT, s.betas[-1], A, starts, noise)
    paths = descend(stacks, etas, s.lam, s.rules, context)
    scaled = {cell: paths[f"{SCALED}/{cell[0]:g}/{cell[1]}"] for cell in s.cells}
    targets = {rank: stacks[f"{SCALED}/{s.betas[0]:g}/{rank}"].A for rank in s.ranks}
    claims = [floor_claim(setting, scaled, etas, beta) for beta in s.betas]
    claims.append(contrast_claim(setting, paths, etas))
    claims += [alignment_claim(paths), descent_claim(setting, scaled, targets, etas)]
    claims.append(tracking_claim(setting, scaled, targets, etas))
    return Outcome([*claims, *settled_claims(setting, scaled, etas)])


def floor_claim(
    setting: MuonSettings, paths: Mapping[tuple[float, int], Path], etas: Sequence[float], beta: float
) -> Claim:
    """The cell that comes closest to its floor, for one momentum."""
    s, half, cells = setting, setting.steps // 2, []
    for rank in s.ranks:
        means = weighted_mean(paths[beta, rank].nuclear, etas, start=half)
        for B, chains in by_batch(means, s).items():
            floor = noise_floor(sigma=s.sigma, beta=beta, r=rank, B=B)
            cells.append((t_interval(chains).high / floor, floor, chains, B, rank))
    _, floor, chains, B, rank = max(cells, key=lambda cell: cell[0])
    return Claim(
        id=f"noise-floor-beta{beta:g}",
        statement=f"with beta {beta:g} the eta-weighted nuclear norm of the gradient is under "
        f"2 sigma sqrt((1 - beta) r/B) (second half; shown: B={B}, r={rank}, the closest of {len(cells)} cells)",
        reference="Theorem 3.3",
        hypothesis=ASSUMED,
        predicted=floor,
        measured=float(chains.mean()),
        comparison=Comparison.AT_MOST,
        tolerance=0.0,
        because="the upper end of the interval must be below",
        interval=t_interval(chains),
        limits="over the whole run the average keeps the transient, whose share dies only like 1/log T",
    )


def contrast_claim(setting: MuonSettings, paths: Mapping[str, Path], etas: Sequence[float]) -> Claim:
    """Constant decay at the smallest floor of the grid."""
    s, beta, B = setting, setting.betas[-1], setting.batches[-1]
    rank = s.ranks[-1]
    means = weighted_mean(paths[f"{CONSTANT}/{beta:g}/{rank}"].nuclear, etas, start=s.steps // 2)
    chains = by_batch(means, s)[B]
    return Claim(
        id="constant-above-floor",
        statement=f"constant decay stays above that floor when the target is outside its ball (B={B}, r={rank})",
        reference="contrast of Proposition 3.2 and Theorem 3.3",
        hypothesis="sigma_max(A) > 1/lambda, sum eta = infinity",
        predicted=noise_floor(sigma=s.sigma, beta=beta, r=rank, B=B),
        measured=float(chains.mean()),
        comparison=Comparison.AT_LEAST,
        tolerance=0.0,
        because="the lower end of the interval must be above",
        interval=t_interval(chains),
    )


MUON = Experiment(
    name="muon-noise",
    title="Muon with noise: the floor for a grid of momentum, batch and rank, and the lemmas on every path",
    hypotheses=("lambda > 0", "sigma >= 0", "0 <= beta < 1", "sum eta = infinity", "sum eta^2 < infinity"),
    settings=MuonSettings(),
    function=run_muon,
    cost=17.0,
)
