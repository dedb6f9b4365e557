"""Slow float64 optimizers that follow the paper line by line, one matrix at a time, and other rules beside its own.

The fast path is tested against these. They share no code with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


def polar(M: Tensor) -> Tensor:
    """Give the factor U V^T of the compact singular value decomposition U S V^T; zero for zero."""
    U, S, Vh = torch.linalg.svd(M.double(), full_matrices=False)
    nonzero = S.max() * 1e-14 < S
    factor: Tensor = (U * nonzero) @ Vh
    return factor


def ns5(M: Tensor) -> Tensor:
    """The paper's five Newton-Schulz steps in float64, as a polynomial of the singular values."""
    U, S, Vh = torch.linalg.svd(M.double(), full_matrices=False)
    norm = S.square().sum().sqrt()
    s = S / norm if norm > 0 else S
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    result: Tensor = (U * s) @ Vh
    return result


@dataclass
class Decay:
    """The fraction phi_t of each rule, as the paper writes it, and what becomes of the norm.

    `T` is the length of the run, `R` the norm of the weight that a norm rule keeps or aims at, by default the first.
    """

    rule: str = "scaled"
    lam: float = 0.1
    eta_max: float = 1.0
    T: int = 1
    norm: str = "free"
    R: float | None = None
    beta2: float = 0.95
    t: int = field(default=0, init=False)
    v: float = field(default=0.0, init=False)

    def observe(self, W: Tensor, G: Tensor) -> None:
        """Begin a step: count it, average the squared gradient, and remember the first norm."""
        self.t += 1
        self.v = self.beta2 * self.v + (1 - self.beta2) * float((G**2).mean())
        if self.R is None:
            self.R = math.sqrt((W**2).sum())

    def phi(self, eta: float) -> float:
        """The fraction of the weight taken away at learning rate `eta`."""
        match self.rule:
            case "constant":
                return self.lam * eta
            case "scaled":
                return self.lam * eta**2 / self.eta_max
            case "squared":
                return self.lam * eta**2
            case "independent":
                return self.lam * eta / self.eta_max
            case "fixed":
                return self.lam
            case "cosine":
                return self.lam * eta * (1 + math.cos(math.pi * (self.t - 1) / self.T)) / 2
            case "log_time":
                return self.lam / self.t * eta / self.eta_max
            case "gradient_norm":
                v_hat = self.v / (1 - self.beta2**self.t)
                return self.lam * eta / math.sqrt(v_hat)
            case "none":
                return 0.0
        raise ValueError(f"unknown decay rule {self.rule!r}")

    def shrink(self, W: Tensor, direction: Tensor, eta: float, cautious: bool) -> Tensor:
        """(1 - phi) W; cautious decay spares entries that the step moves away from zero."""
        mask = (W * direction >= 0).double() if cautious else torch.ones_like(W)
        return W - self.phi(eta) * mask * W

    def move(self, W: Tensor, U: Tensor, eta: float, eta_hat: float, cautious: bool) -> Tensor:
        """The next weight from this one and a direction, at the learning rate before and after the shape scale."""
        R = self.R or 0.0
        if self.norm == "target":
            return W - self.phi(eta) * (1 - R / math.sqrt((W**2).sum())) * W - eta_hat * U
        if self.norm == "hyperball":
            V = W - eta * R * U / math.sqrt((U**2).sum())
            return R * V / math.sqrt((V**2).sum())
        return self.shrink(W, U, eta, cautious) - eta_hat * U


@dataclass
class ReferenceMuonSW:
    """Algorithm 1 (heavy-ball, no Nesterov) and the listing's form (EMA, Nesterov), for one matrix.

    `stretch` is a function of (out, in); `in_out` says that W is stored as (in, out).
    """

    W: Tensor
    decay: Decay
    beta: float = 0.95
    nesterov: bool = False
    heavy_ball: bool = True
    orthogonalize: Callable[[Tensor], Tensor] = polar
    stretch: Callable[[int, int], float] = lambda out, into: 0.2 * max(out, into) ** 0.5
    in_out: bool = False
    cautious: bool = False
    M: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.W = self.W.double().clone()
        self.M = torch.zeros_like(self.W)

    def step(self, G: Tensor, eta: float) -> None:
        """One step at learning rate `eta`."""
        G = G.double()
        gain = 1.0 if self.heavy_ball else 1 - self.beta
        self.M = self.beta * self.M + gain * G
        ahead = gain * G + self.beta * self.M if self.nesterov else self.M
        O = self.orthogonalize(ahead)  # noqa: E741
        m, n = reversed(self.W.shape) if self.in_out else self.W.shape
        eta_hat = eta * self.stretch(m, n)
        self.decay.observe(self.W, G)
        self.W = self.decay.move(self.W, O, eta, eta_hat, self.cautious)


@dataclass
class ReferenceAdamWSW:
    """AdamW with any decay rule, for one tensor."""

    W: Tensor
    decay: Decay
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    cautious: bool = False
    t: int = 0
    m: Tensor = field(init=False)
    v: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.W = self.W.double().clone()
        self.m = torch.zeros_like(self.W)
        self.v = torch.zeros_like(self.W)

    def step(self, G: Tensor, eta: float) -> None:
        """One step at learning rate `eta`."""
        G = G.double()
        b1, b2 = self.betas
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * G
        self.v = b2 * self.v + (1 - b2) * G**2
        m_hat = self.m / (1 - b1**self.t)
        v_hat = self.v / (1 - b2**self.t)
        U = m_hat / (v_hat.sqrt() + self.eps)
        self.decay.observe(self.W, G)
        self.W = self.decay.move(self.W, U, eta, eta, self.cautious)


@dataclass
class ReferenceSGDSW:
    """SGD with momentum and any decay rule, for one tensor."""

    W: Tensor
    decay: Decay
    beta: float = 0.0
    nesterov: bool = False
    heavy_ball: bool = True
    cautious: bool = False
    M: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.W = self.W.double().clone()
        self.M = torch.zeros_like(self.W)

    def step(self, G: Tensor, eta: float) -> None:
        """One step at learning rate `eta`."""
        G = G.double()
        gain = 1.0 if self.heavy_ball else 1 - self.beta
        self.M = self.beta * self.M + gain * G
        U = gain * G + self.beta * self.M if self.nesterov else self.M
        self.decay.observe(self.W, G)
        self.W = self.decay.move(self.W, U, eta, eta, self.cautious)
