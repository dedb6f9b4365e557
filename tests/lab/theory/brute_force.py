"""The iterations of the theory in a few lines of float64, without the library's optimizers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

EPS = torch.finfo(torch.float64).eps
Rule = Callable[[float, float], float]


def constant_decay(eta: float, lam: float) -> float:
    return lam * eta


def scaled_decay(eta_max: float) -> Rule:
    return lambda eta, lam: lam * eta**2 / eta_max


def descend(w: float, etas: list[float], rule: Rule, a: float, c: float, lam: float) -> float:
    for eta in etas:
        w = w - eta * a * (w - c) - rule(eta, lam) * w
    return w


def polar(M: torch.Tensor) -> torch.Tensor:
    U, S, Vh = torch.linalg.svd(M, full_matrices=False)
    return (U * (S.unsqueeze(-2) > 0)) @ Vh


def matrix(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@dataclass
class MuonStep:
    """What one step of Muon saw; the batch dimension runs over independent chains."""

    W: torch.Tensor
    grad: torch.Tensor
    O: torch.Tensor  # noqa: E741
    error: torch.Tensor


def run_muon(
    W: torch.Tensor,
    A: torch.Tensor,
    etas: list[float],
    rule: Rule,
    lam: float,
    *,
    beta: float = 0.0,
    noise: float = 0.0,
) -> Iterator[MuonStep]:
    """Muon on 1/2 |W - A|^2, with the noise's deviation per element. The last item holds the final weights."""
    generator = torch.Generator().manual_seed(7)
    M = torch.zeros_like(W)
    for eta in etas:
        grad = W - A
        xi = noise * torch.randn(W.shape, dtype=W.dtype, generator=generator) if noise else 0.0
        M = beta * M + grad + xi
        step = MuonStep(W, grad, polar(M), (1 - beta) * M - grad)
        yield step
        W = (1 - rule(eta, lam)) * W - eta * step.O
    yield MuonStep(W, W - A, torch.zeros_like(W), torch.zeros_like(W))


def spectral(X: torch.Tensor) -> float:
    return torch.linalg.matrix_norm(X, ord=2).item()
