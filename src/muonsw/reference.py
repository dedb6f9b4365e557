"""The whole optimizer in float64, one tensor at a time, as the paper writes it: read this first.

A step updates the momentum, turns it into a direction U, and moves the weight: `W <- (1 - phi) W - eta_hat U`. The
library does this for all parameters at once, in any precision, on many ranks. Its tests compare it with this file; the
two share no code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


def polar(M: Tensor) -> Tensor:
    """The factor U V^T of the compact singular value decomposition U S V^T; zero for zero."""
    U, S, Vh = torch.linalg.svd(M.double(), full_matrices=False)
    return torch.mm(U * (S.max() * 1e-14 < S), Vh)


def ns5(M: Tensor) -> Tensor:
    """The paper's five Newton-Schulz steps, as a polynomial of the singular values."""
    U, S, Vh = torch.linalg.svd(M.double(), full_matrices=False)
    s = S / S.norm() if S.norm() > 0 else S
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return torch.mm(U * s, Vh)


@dataclass
class Decay:
    """The fraction phi_t of each rule, and the rules that control the norm."""

    rule: str = "scaled"
    lam: float = 0.1
    eta_max: float = 1.0
    T: int = 1  # steps of the whole run
    norm: str = "free"
    R: float | None = None  # target of the norm rules, by default the initial norm
    beta2: float = 0.95
    t: int = field(default=0, init=False)
    v: float = field(default=0.0, init=False)

    def phi(self, eta: float) -> float:
        """The fraction of the weight that decay removes at learning rate `eta`."""
        rules: dict[str, Callable[[], float]] = {
            "constant": lambda: eta,
            "scaled": lambda: eta**2 / self.eta_max,
            "squared": lambda: eta**2,
            "independent": lambda: eta / self.eta_max,
            "fixed": lambda: 1.0,
            "cosine": lambda: eta * (1 + math.cos(math.pi * (self.t - 1) / self.T)) / 2,
            "log_time": lambda: eta / self.eta_max / self.t,
            "gradient_norm": lambda: eta / math.sqrt(self.v / (1 - self.beta2**self.t)),
            "none": lambda: 0.0,
        }
        return self.lam * rules[self.rule]()

    def move(self, W: Tensor, G: Tensor, U: Tensor, eta: float, eta_hat: float, cautious: bool) -> Tensor:
        """The next weight; `eta` and `eta_hat` are the learning rate before and after the shape scale."""
        self.t, self.v = self.t + 1, self.beta2 * self.v + (1 - self.beta2) * float((G**2).mean())
        self.R = R = math.sqrt((W**2).sum()) if self.R is None else self.R
        if self.norm == "target":
            return W - self.phi(eta) * (1 - R / math.sqrt((W**2).sum())) * W - eta_hat * U
        if self.norm == "hyperball":
            V = W - eta * R * U / math.sqrt((U**2).sum())
            return R * V / math.sqrt((V**2).sum())
        mask = (W * U >= 0).double() if cautious else torch.ones_like(W)  # no decay where the step moves outward
        return W - self.phi(eta) * mask * W - eta_hat * U


@dataclass
class ReferenceMuonSW:
    """Muon as in the paper's Algorithm 1 (heavy ball) or in its code listing (average, Nesterov)."""

    W: Tensor
    decay: Decay
    beta: float = 0.95
    nesterov: bool = False
    heavy_ball: bool = True
    orthogonalize: Callable[[Tensor], Tensor] = polar
    stretch: Callable[..., float] = lambda out, into: 0.2 * max(out, into) ** 0.5
    in_out: bool = False  # W is stored as (in, out)
    cautious: bool = False

    def __post_init__(self) -> None:
        self.W, self.M = self.W.double().clone(), torch.zeros_like(self.W, dtype=torch.float64)

    def step(self, G: Tensor, eta: float) -> None:
        """One step at learning rate `eta`."""
        G = G.double()
        gain = 1.0 if self.heavy_ball else 1 - self.beta
        self.M = self.beta * self.M + gain * G
        ahead = gain * G + self.beta * self.M if self.nesterov else self.M
        eta_hat = eta * self.stretch(*(reversed(self.W.shape) if self.in_out else self.W.shape))
        self.W = self.decay.move(self.W, G, self.orthogonalize(ahead), eta, eta_hat, self.cautious)


@dataclass
class ReferenceSGDSW(ReferenceMuonSW):
    """SGD: the momentum itself is the direction; any shape."""

    beta: float = 0.0
    orthogonalize: Callable[[Tensor], Tensor] = lambda ahead: ahead
    stretch: Callable[..., float] = lambda *_: 1.0


@dataclass
class ReferenceAdamWSW:
    """AdamW: the average gradient divided by the root of the average squared gradient."""

    W: Tensor
    decay: Decay
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    cautious: bool = False

    def __post_init__(self) -> None:
        self.W, self.t = self.W.double().clone(), 0
        self.m, self.v = torch.zeros_like(self.W), torch.zeros_like(self.W)

    def step(self, G: Tensor, eta: float) -> None:
        """One step at learning rate `eta`."""
        G = G.double()
        (b1, b2), self.t = self.betas, self.t + 1
        self.m, self.v = b1 * self.m + (1 - b1) * G, b2 * self.v + (1 - b2) * G**2
        U = self.m / (1 - b1**self.t) / ((self.v / (1 - b2**self.t)).sqrt() + self.eps)
        self.W = self.decay.move(self.W, G, U, eta, eta, self.cautious)
