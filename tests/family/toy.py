"""The shortest matrix algorithm: directions are gradients divided by the root of an average of G G^T's diagonal.

It keeps one state of each kind, and does something else every second step, as preconditioners do.
"""

import torch

from muonsw.algorithms.base import matrix_algorithm
from muonsw.slots import ELEMENTWISE, StateSpec


def state(group):
    del group
    return {"toy_average": ELEMENTWISE, "toy_factor": StateSpec(square), "toy_root": StateSpec(column)}


def square(m, n):
    del n
    return m, m


def column(m, n):
    del n
    return m, 1


def directions(group, G, kept):
    average = torch.lerp(kept["toy_average"], G, 0.5)
    factor = kept["toy_factor"] + G @ G.mT
    root = kept["toy_root"]
    if group["update_count"] % group["toy_every"] == 1:
        root = factor.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).sqrt()
    return average / (root + 1.0), {"toy_average": average, "toy_factor": factor, "toy_root": root}


TOY = matrix_algorithm(
    defaults={"toy_every": 2},
    state=state,
    directions=directions,
    scale=lambda group, m, n: m / n,  # noqa: ARG005
    counts_steps=True,
)


class Reference:
    """One matrix in float64."""

    def __init__(self, W):
        self.W, self.t = W.double().clone(), 0
        self.average, self.factor = torch.zeros_like(self.W), torch.zeros(W.shape[0], W.shape[0], dtype=torch.float64)

    def step(self, G, lr, phi):
        self.t += 1
        self.average = 0.5 * self.average + 0.5 * G
        self.factor = self.factor + G @ G.T
        if self.t % 2:
            self.root = self.factor.diag().sqrt()[:, None]
        self.W = (1 - phi) * self.W - lr * self.W.shape[0] / self.W.shape[1] * self.average / (self.root + 1.0)
