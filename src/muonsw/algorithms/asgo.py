"""ASGO: momentum times the inverse square root of one factor, that of the shorter side.

An et al., "ASGO: Adaptive Structured Gradient Optimization" (2025). The rule is that of the authors' asgo.py. Unlike
there, nothing waits for the device, and a root that is not finite is replaced by the identity without a message.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from muonsw.algorithms.factors import finite_or
from muonsw.algorithms.triangles import pack, packed_shape, unpack
from muonsw.algorithms.whole import ELEMENTWISE, MatrixState, matrix_algorithm
from muonsw.machine import full_float32
from muonsw.matrices import ADAMW_RMS
from muonsw.slots import Specs, State
from muonsw.work import Group

# Polar Express (Amsel et al. 2025) as the authors of ASGO use it: all polynomials but the last made safe for singular
# values up to 1.01, and the last one repeated.
_POLYNOMIALS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_SAFETY = 1.01
_STEPS = 10
_SAFE = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLYNOMIALS[:-1]]
COEFFICIENTS = (*_SAFE, *[_POLYNOMIALS[-1]] * (_STEPS - len(_SAFE)))


@_disable_dynamo  # the precision of products is a global setting of torch
@full_float32()
def asgo(group: Group, G: Tensor, state: State) -> tuple[Tensor, State]:
    """Directions of RMS 0.2 for gradients (count, m, n), and the state after them.

    Args:
        group: the options.
        G: the gradients.
        state: `exp_avg` (count, m, n), and `factor`, d x d and packed (`triangles.py`), of the rows where they are
            fewer, else of the columns.
    """
    beta1, beta2 = group["betas"]
    wide = G.shape[-2] < G.shape[-1]
    exp_avg = state["exp_avg"].lerp(G, 1 - beta1)
    factor = state["factor"].lerp(pack(G @ G.mT if wide else G.mT @ G), 1 - beta2)
    root = inverse_sqrt(unpack(factor), group["eps"])
    direction = root @ exp_avg if wide else exp_avg @ root
    rms = direction.square().mean((-2, -1), keepdim=True).sqrt()
    direction = torch.where(rms > 0, ADAMW_RMS / rms, 0) * direction
    return direction, {"exp_avg": exp_avg, "factor": factor}


def inverse_sqrt(V: Tensor, eps: float) -> Tensor:
    """V^-1/2 of positive semidefinite matrices, by a coupled iteration; the identity where it is not finite.

    `Y = V/L, Z = I`, then `B = b Z Y + c (Z Y)^2, Y <- Y (a + B), Z <- (a + B) Z`. In a direction in which V has
    nothing Z stays finite: it is the product of all `a`, about 22,000.
    """
    identity = torch.eye(V.shape[-1], dtype=V.dtype, device=V.device)
    L = _SAFETY * torch.linalg.matrix_norm(V + eps * identity, keepdim=True)
    Y, Z = V / L, identity.expand_as(V)
    for a, b, c in COEFFICIENTS:
        P = Z @ Y
        B = b * P + c * P @ P
        Y, Z = a * Y + Y @ B, a * Z + B @ Z
    return finite_or(Z / L.sqrt(), identity)


def state(group: Group) -> Specs:  # noqa: ARG001
    """Momentum, and the factor of the shorter side."""
    return {"exp_avg": ELEMENTWISE, "factor": MatrixState(lambda m, n: packed_shape(min(m, n)))}


ASGO = matrix_algorithm(
    defaults={"betas": (0.9, 0.8), "eps": 1e-10},
    state=state,
    directions=asgo,
)
