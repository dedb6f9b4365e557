"""Every member of the family in float64, one matrix at a time.

`recorded.json` holds the steps of the authors' own code, run in float64 even where it casts to something narrower. Each
entry names the repository, commit and file; options have MuonSW's names.
"""

import json
import math
from itertools import count
from pathlib import Path

import torch

from muonsw.orthogonalize import COEFFICIENT_SETS
from muonsw.reference import ReferenceMuonSW, ns5


def recorded(name):
    return json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))[name]


def gradient(shape, step):
    """Full rank with well-separated singular values, different at every step; a formula that needs no generator."""
    rows, columns = (torch.arange(1, length + 1, dtype=torch.float64) for length in shape)
    phases = torch.outer(rows.sqrt(), columns) + torch.outer(rows**2, (columns + 2).sqrt()) + 1.7 * (step + 1)
    return torch.sin(3 * phases) + 0.3 * torch.cos((step + 2) * phases)


def start(shape):
    return 0.1 * gradient(shape, -1)


def zeros(size):
    return torch.zeros(size, size, dtype=torch.float64)


def orthogonalize(name, M, steps=None):
    coefficients = COEFFICIENT_SETS[name]
    U, S, Vh = torch.linalg.svd(M.double(), full_matrices=False)
    s = S / (coefficients.divisor * S.norm()) if S.norm() > 0 else S
    for k in range(steps or coefficients.steps):
        a, b, c = coefficients.polynomials[min(k, len(coefficients.polynomials) - 1)]
        s = a * s + b * s**3 + c * s**5
    return torch.mm(U * s, Vh)


def aurora(M, K=2, beta=0.5):
    m, n = M.shape
    if m == n:
        return orthogonalize("simple_quintic", M)
    if m < n:
        return aurora(M.T, K, beta).T
    D = torch.stack([1 / row.norm() if row.any() else torch.ones(()).double() for row in M])
    for k in range(K):
        U = orthogonalize("simple_quintic", D[:, None] * M)
        if k < K - 1:
            squares = (U**2).sum(1)
            D = torch.where(squares > 0, D * ((n / m) / squares) ** beta, D)
    return U


# Relatives of Muon, which add something before or after the orthogonalizer.


class Member(ReferenceMuonSW):
    """The direction is `after(ns5(before(momentum)))`, with Nesterov's momentum."""

    def __init__(self, W, decay, **options):
        super().__init__(W, decay, nesterov=True, heavy_ball=False, orthogonalize=self.direction)
        self.V, self.t = torch.zeros_like(self.W), 0
        vars(self).update(options)

    def before(self, ahead):
        return ahead

    def after(self, U):
        return U

    def direction(self, ahead):
        return self.after(ns5(self.before(ahead)))

    def step(self, G, eta):
        self.G = G.double()
        super().step(G, eta)
        self.t += 1


class NorMuon(Member):
    """Rows of nearly equal norm, from section 3 of the paper."""

    beta2, eps, longer, snap = 0.95, 1e-10, False, False

    def after(self, U):
        if self.snap:
            U = U * math.sqrt(min(U.shape)) / U.norm()
        along = 0 if self.longer and U.shape[0] < U.shape[1] else 1
        self.V = self.beta2 * self.V + (1 - self.beta2) * (U**2).mean(along, keepdim=True)
        divided = U / (self.V.sqrt() + self.eps)
        return divided * U.norm() / (divided.norm() + self.eps)


class Muon2(Member):
    """Momentum divided by the root of the average squared gradient."""

    beta2, eps = 0.95, 1e-10

    def before(self, ahead):
        self.V = self.beta2 * self.V + (1 - self.beta2) * self.G**2
        return ahead / (self.V.sqrt() + self.eps)


class Signs(Member):
    def before(self, ahead):
        return torch.sign(ahead)


class Adapted(Member):
    """Directions divided by the root of their average square, then scaled to the norm of an orthogonal matrix."""

    eps = 1e-8

    def after(self, U):
        self.V = self.beta * self.V + (1 - self.beta) * U**2
        divided = U / (self.V.sqrt() + self.eps)
        return divided * math.sqrt(min(U.shape)) / (divided.norm() + self.eps)


class AdaMuon(Signs, Adapted):
    pass


class Equalized(Member):
    """MuonEq: rows of equal norm before the orthogonalizer."""

    def before(self, ahead):
        return ahead * ahead.norm() / math.sqrt(len(ahead)) / ahead.norm(dim=1, keepdim=True)


class Snapped(Member):
    """Muon+: directions scaled to the norm of an orthogonal matrix."""

    def after(self, U):
        return U * math.sqrt(min(U.shape)) / U.norm()


class SoapMuon(Member):
    """Momentum whitened in the eigenbases of averages of G G^T and G^T G, after modded-nanogpt's track 3."""

    beta2, eps, period, Q = 0.9, 1e-8, 1, None

    def before(self, ahead):
        G = self.G
        if self.Q is not None:
            left, right = self.Q
            rotated = left.T @ ahead @ right
            self.V = self.beta2 * self.V + (1 - self.beta2) * rotated**2
            ahead = left @ (rotated / torch.clamp(self.V.sqrt(), min=self.eps)) @ right.T
        if self.t == 0:
            self.factors = [zeros(size) for size in G.shape]
        for factor, product in zip(self.factors, (G @ G.T, G.T @ G), strict=True):
            factor.mul_(self.beta2).add_((1 - self.beta2) * product)
        if self.Q is None:
            self.Q = [torch.linalg.eigh(factor)[1].flip(1) for factor in self.factors]
        elif self.t % self.period == 0:
            for side in (0, 1):
                Q, factor = self.Q[side], self.factors[side]
                order = torch.diag(Q.T @ factor @ Q).argsort(descending=True)
                self.V = self.V.index_select(side, order)
                self.Q[side] = torch.linalg.qr(factor @ Q[:, order])[0]
        return ahead


def in_blocks(sizes, period, axis, stretch):
    """MuonBP's direction: blocks of these sizes along an axis, but every `period` steps the whole matrix."""
    steps = count(1)

    def moves(M):
        blocks = [M] if next(steps) % period == 0 else M.split(sizes, axis)
        return torch.cat([ns5(block) * stretch(*block.shape) for block in blocks], axis)

    return moves
