"""Clipping singular values as a projection, the fact behind the loss floor of constant decay."""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.lab.claims.claim import Claim, Comparison
from muonsw.lab.studies.theory.chains import gaussian, nuclear_norm
from muonsw.theory import clip_projection, muon_loss_floor


def projection_claims(A: Tensor, radius: float, generator: torch.Generator) -> list[Claim]:
    """Clipping singular values is the projection onto the ball; certified by duality, and by rivals."""
    P = clip_projection(A, radius)
    D = A - P
    rivals = gaussian((1000, *A.shape), generator, std=1e-3 * radius) + P
    rivals = clip_projection(rivals, radius)
    nearest = float((rivals - A).square().sum((-2, -1)).min())
    return [
        Claim(
            id="clip-distance",
            statement="the clipped matrix is sum (sigma_i - rho)_+^2 away from A",
            reference="proof of Proposition 3.2",
            hypothesis="rho >= 0",
            predicted=2.0 * muon_loss_floor(torch.linalg.svdvals(A), lam=1.0 / radius),
            measured=float(D.square().sum()),
            comparison=Comparison.RELATIVE,
            tolerance=1e-12,
            because="rounding of the SVD",
        ),
        Claim(
            id="clip-optimal",
            statement="no matrix of the ball is nearer: max over the ball of <A - P, W> is attained at W = P",
            reference="proof of Proposition 3.2",
            hypothesis="rho >= 0",
            predicted=radius * float(nuclear_norm(D)),
            measured=float((D * P).sum()),
            comparison=Comparison.RELATIVE,
            tolerance=1e-12,
            because="rounding of the SVD; equality certifies the projection",
        ),
        Claim(
            id="clip-rivals",
            statement="a thousand random matrices of the ball near it are all farther from A",
            reference="proof of Proposition 3.2",
            hypothesis="rho >= 0",
            predicted=float(D.square().sum()),
            measured=nearest,
            comparison=Comparison.AT_LEAST,
            tolerance=1e-12,
            because="rounding of the SVD",
        ),
    ]
