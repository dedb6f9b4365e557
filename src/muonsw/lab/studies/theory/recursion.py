"""The recursion of stochastic approximation, run with equality, against the bound of its lemma."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from muonsw.lab.claims.claim import Claim, Comparison
from muonsw.lab.studies.experiment import Context
from muonsw.lab.studies.theory.chains import chain, gradient, march, sgd
from muonsw.theory import sa_constant

ALPHAS, KAPPAS, STARTS = (1.0, 1.5, 3.0), (0.5, 2.0), (0.0, 0.1, 1.0)


def recursion_claims(etas: Sequence[float], *, gamma: float, t0: float, context: Context) -> list[Claim]:
    """Lemma D.1 with equality: `u <- (1 - alpha eta) u + kappa eta^2`, an SGD step with gradient `alpha u - kappa eta`.

    The optimizer's own decay is off; all constants run as one vector.
    """
    grid = torch.tensor(list(itertools.product(ALPHAS, KAPPAS, STARTS)), dtype=torch.float64)
    alpha, kappa, start = grid.unbind(1)
    nu = torch.tensor(
        [sa_constant(u1=u, t1=0, alpha=a, kappa=k, gamma=gamma, t0=t0) for a, k, u in grid.tolist()],
        dtype=torch.float64,
    )
    u = chain(start)
    optimizer = sgd([{"params": [u], "decay": "none"}], peak=max(etas), lam=1.0)
    largest = (start * t0 / nu).max()
    for t in march(optimizer, etas, context.progress, part=(0.8, 1.0)):
        torch.mul(u, alpha, out=gradient(u)).sub_(kappa, alpha=etas[t])
        optimizer.step()
        largest = torch.maximum(largest, (u * (t + 1 + t0) / nu).max())
    limit = kappa * gamma**2 / (alpha * gamma - 1.0)
    reached = u.detach() * (len(etas) + t0) / limit
    hypothesis = "alpha gamma > 1, alpha eta <= 1"
    return [
        Claim(
            id="recursion-bound",
            statement="u <- (1 - alpha eta) u + kappa eta^2 stays under nu/(t + t0), for a grid of constants",
            reference="Lemma D.1",
            hypothesis=hypothesis,
            predicted=1.0,
            measured=float(largest),
            comparison=Comparison.AT_MOST,
            tolerance=1e-12,
            because="rounding; nu/(t + t0) is met at the first step where the start dominates",
        ),
        Claim(
            id="recursion-constant",
            statement="(t + t0) u tends to kappa gamma^2/(alpha gamma - 1), so nu cannot be improved",
            reference="Lemma D.1",
            hypothesis=hypothesis,
            predicted=1.0,
            measured=float(reached[(reached - 1.0).abs().argmax()]),
            comparison=Comparison.RELATIVE,
            tolerance=0.02,
            because="the start, forgotten like (t0/t)^(alpha gamma - 1), 0.4% at the slowest",
        ),
    ]
