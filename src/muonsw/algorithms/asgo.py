"""ASGO: momentum times the inverse square root of the factor of its shorter side.

An et al., "ASGO: Adaptive Structured Gradient Optimization" (2025). The rule follows the authors' asgo.py. Unlike
theirs, ours never waits for the device, and it replaces a non-finite root by the identity without a message.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muonsw.algorithms.base import matrix_algorithm
from muonsw.algorithms.factors import finite_or, fold, folded_shape, unfold
from muonsw.machine import full_float32
from muonsw.matrices import ADAMW_RMS
from muonsw.orthogonalize.iterations import COEFFICIENT_SETS, POLAR_EXPRESS_SAFETY
from muonsw.slots import ELEMENTWISE, StateSpec
from muonsw.work import Group, State

# Polar Express as the authors of ASGO use it; the division by the safety factor is in `inverse_sqrt`.
COEFFICIENTS = COEFFICIENT_SETS["polar_express"]._replace(divisor=1.0).schedule(10)


@full_float32()
def asgo(group: Group, G: Tensor, state: State) -> tuple[Tensor, State]:
    """Directions of RMS 0.2 for gradients (count, m, n), and the state after them.

    `state` is `exp_avg` (count, m, n), and `factor`, the folded (`factors.py`) d x d factor of the shorter side (of the
    columns if the matrix is square).
    """
    beta1, beta2 = group["betas"]
    wide = G.shape[-2] < G.shape[-1]
    exp_avg = state["exp_avg"].lerp(G, 1 - beta1)
    factor = state["factor"].lerp(fold(G @ G.mT if wide else G.mT @ G), 1 - beta2)
    root = inverse_sqrt(unfold(factor), group["eps"])
    direction = root @ exp_avg if wide else exp_avg @ root
    rms = direction.square().mean((-2, -1), keepdim=True).sqrt()
    direction = torch.where(rms > 0, ADAMW_RMS / rms, 0) * direction
    return direction, {"exp_avg": exp_avg, "factor": factor}


def inverse_sqrt(V: Tensor, eps: float) -> Tensor:
    """V^-1/2 of positive semidefinite matrices, by a coupled iteration; the identity if it is not finite.

    `Y = V/L, Z = I`, then `B = b Z Y + c (Z Y)^2, Y <- Y (a + B), Z <- (a + B) Z`. On the null space of V, Z stays
    finite: it is the product of all `a`, about 22,000.
    """
    identity = torch.eye(V.shape[-1], dtype=V.dtype, device=V.device)
    L = POLAR_EXPRESS_SAFETY * torch.linalg.matrix_norm(V + eps * identity, keepdim=True)
    Y, Z = V / L, identity.expand_as(V)
    for a, b, c in COEFFICIENTS:
        P = Z @ Y
        B = b * P + c * P @ P
        Y, Z = a * Y + Y @ B, a * Z + B @ Z
    return finite_or(Z / L.sqrt(), identity)


ASGO = matrix_algorithm(
    defaults={"betas": (0.9, 0.8), "eps": 1e-10},
    state=lambda _: {"exp_avg": ELEMENTWISE, "factor": StateSpec(lambda m, n: folded_shape(min(m, n)))},
    directions=asgo,
)
