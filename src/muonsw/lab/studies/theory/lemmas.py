"""The lemmas behind Muon's noise floor, checked on every path of a grid of momentum, batch size and rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from muonsw.lab.claims.claim import Claim, Comparison
from muonsw.lab.claims.statistics import t_interval
from muonsw.lab.studies.theory.chains import TRUE_RULES, Rules
from muonsw.lab.studies.theory.paths import Path
from muonsw.theory import descent_bound, shrink_constant, tracking_error_bounds, tracking_error_limit

ASSUMED = "L-smooth, noise of variance sigma^2/B, iterates bounded, sum eta = infinity, sum eta^2 < infinity"


@dataclass(frozen=True)
class MuonSettings:
    """A grid of momentum, batch size and rank on the matrix quadratic; matrices are (rank, 2 rank).

    `sigma` is the noise of the whole matrix, so that an entry deviates by `sigma / sqrt(B m n)`.
    """

    betas: tuple[float, ...] = (0.0, 0.5, 0.9)
    batches: tuple[int, ...] = (1, 4, 16)
    ranks: tuple[int, ...] = (4, 8)
    sigma: float = 2.0
    lam: float = 0.5
    eta0: float = 1.8
    sigma_max: float = 2.0
    steps: int = 1500
    chains: int = 6
    start_std: float = 0.02
    rules: Rules = TRUE_RULES

    @property
    def cells(self) -> list[tuple[float, int]]:
        """Every pair of momentum and rank; batch sizes share a stack."""
        return [(beta, rank) for beta in self.betas for rank in self.ranks]


def by_batch(values: Tensor, setting: MuonSettings) -> dict[int, Tensor]:
    """Split the chains of a stack by batch size, the last axis being chains."""
    return dict(zip(setting.batches, values.chunk(len(setting.batches), dim=-1), strict=True))


def alignment_claim(paths: Mapping[str, Path]) -> Claim:
    """The lemma, at every step of every path of either rule."""
    return Claim(
        id="alignment",
        statement="<grad f, O> is at least |grad f|_* - 2 sqrt(r) |E|_F (smallest margin over all steps and chains)",
        reference="Lemma D.2",
        hypothesis="O is the polar factor of the momentum",
        predicted=0.0,
        measured=min(float(path.margins.min()) for path in paths.values()),
        comparison=Comparison.AT_LEAST,
        tolerance=1e-8,
        because="the polar factor is exact to 2e-10; O is read off the weights, which costs |W| ulp/eta",
    )


def descent_claim(
    setting: MuonSettings,
    paths: Mapping[tuple[float, int], Path],
    targets: Mapping[int, Tensor],
    etas: Sequence[float],
) -> Claim:
    """The descent inequality, summed over the run with the path's own errors and norms."""
    s, ratios = setting, list[float]()
    for (_, rank), path in paths.items():
        size = float(targets[rank].square().sum().sqrt())
        sums = (path.nuclear * path.nuclear.new_tensor(etas).unsqueeze(1)).sum(0).tolist()
        drops, tops = (path.losses[0] - path.losses[-1]).tolist(), path.norms.amax(0).tolist()
        for total, drop, top, errors in zip(sums, drops, tops, path.errors.T.tolist(), strict=True):
            C_W = shrink_constant(grad_zero=size, L=1.0, bound=top)
            q = s.lam / s.eta0
            ratios.append(total / descent_bound(etas, errors, f_drop=drop, q=q, C_W=C_W, L=1.0, r=rank, bound=top))
    return Claim(
        id="descent-inequality",
        statement="sum eta |grad f|_* is under the finite-T bound, on every single path (largest ratio)",
        reference="proof of Theorem 3.3",
        hypothesis="L-smooth; no expectation needed",
        predicted=1.0,
        measured=max(ratios),
        comparison=Comparison.AT_MOST,
        tolerance=1e-9,
        because="the polar factor is exact to 2e-10",
    )


def tracking_claim(
    setting: MuonSettings,
    paths: Mapping[tuple[float, int], Path],
    targets: Mapping[int, Tensor],
    etas: Sequence[float],
) -> Claim:
    """Measured mean squared tracking errors over the bound's, summed over the run."""
    s, ratios = setting, list[float]()
    for (beta, rank), path in paths.items():
        size, q = float(targets[rank].square().sum().sqrt()), s.lam / s.eta0
        norms = by_batch(path.norms, s)
        for B, errors in by_batch(path.errors, s).items():
            bound = math.sqrt(float(norms[B].square().mean(1).max()))
            bounds = tracking_error_bounds(
                etas,
                grad_start=size + float(norms[B][0].max()),
                sigma=s.sigma,
                beta=beta,
                B=B,
                L=1.0,
                r=rank,
                q=q,
                bound=bound,
            )
            ratios.append(float(errors.square().mean(1).sum()) / math.fsum(bounds))
    return Claim(
        id="tracking-bound",
        statement="the mean squared tracking error is under its bound, summed over the run (largest ratio of the grid)",
        reference="Lemma D.3",
        hypothesis=ASSUMED,
        predicted=1.0,
        measured=max(ratios),
        comparison=Comparison.AT_MOST,
        tolerance=sampling_error(setting),
        because="with beta = 0 both sides are equal in expectation; four standard errors of the sample mean",
    )


def settled_claims(
    setting: MuonSettings, paths: Mapping[tuple[float, int], Path], etas: Sequence[float]
) -> list[Claim]:
    """Where the tracking error settles, for each momentum: below the lemma's limit."""
    s, claims = setting, []
    rank, B = s.ranks[0], s.batches[0]
    for beta in s.betas:
        late = by_batch(paths[beta, rank].errors, s)[B][s.steps // 2 :].square().mean(0)
        limit = tracking_error_limit(sigma=s.sigma, beta=beta, B=B)
        claims.append(
            Claim(
                id=f"tracking-settles-beta{beta:g}",
                statement=f"with beta {beta:g} and independent noise the squared tracking error settles at "
                f"(1 - beta)/(1 + beta) sigma^2/B, below the lemma's limit {limit:g}",
                reference="Lemma D.3, sharpened",
                hypothesis=f"noise independent between steps, eta -> 0 (B={B}, r={rank})",
                predicted=limit / (1.0 + beta),
                measured=float(late.mean()),
                comparison=Comparison.RELATIVE,
                tolerance=drift(setting, limit / (1.0 + beta), beta, etas)
                + sampling_error(setting) * math.sqrt((1.0 + beta**2) / (1.0 - beta**2)),
                because="four standard errors, errors being correlated over 1/(1 - beta) steps, and the drift of W: a "
                "step follows the error, which adds 2 beta^2 eta/(s (1 - beta^2)) for singular values of size s",
                interval=t_interval(late),
            )
        )
    return claims


def drift(setting: MuonSettings, squared_error: float, beta: float, etas: Sequence[float]) -> float:
    """How much the moving target adds to the squared tracking error over the second half, relative to it."""
    late = etas[setting.steps // 2 :]
    size = math.sqrt(squared_error / setting.ranks[0]) or math.inf
    return 2.0 * beta**2 * math.fsum(late) / len(late) / (size * (1.0 - beta**2))


def sampling_error(setting: MuonSettings) -> float:
    """Four relative standard errors of a mean square over half a run of the smallest matrices."""
    entries = 2 * min(setting.ranks) ** 2
    return 4.0 * math.sqrt(2.0 / (entries * setting.chains * setting.steps / 2.0))
