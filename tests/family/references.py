"""Every member of the family in float64, one matrix at a time.

`recorded.json` holds what the authors' own code did, in float64 wherever it casts to something narrower. Each entry
names the repository, commit and file.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from muonsw.orthogonalize import COEFFICIENT_SETS
from muonsw.reference import Decay, ns5


def recorded(name):
    return json.loads((Path(__file__).parent / "recorded.json").read_text(encoding="utf-8"))[name]


def gradient(shape, step):
    """A formula: full rank, singular values well apart, another one at every step."""
    rows, columns = (torch.arange(1, length + 1, dtype=torch.float64) for length in shape)
    phases = torch.outer(rows.sqrt(), columns) + torch.outer(rows**2, (columns + 2).sqrt()) + 1.7 * (step + 1)
    return torch.sin(3 * phases) + 0.3 * torch.cos((step + 2) * phases)


def start(shape):
    return 0.1 * gradient(shape, -1)


def zeros(size):
    return torch.zeros(size, size, dtype=torch.float64)


def orthogonalize(name, M, steps=None):
    known = COEFFICIENT_SETS[name]
    U, S, Vh = torch.linalg.svd(M.double(), full_matrices=False)
    s = S / (known.divisor * S.norm()) if S.norm() > 0 else S
    for k in range(steps or known.steps):
        a, b, c = known.polynomials[min(k, len(known.polynomials) - 1)]
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


# Relatives of Muon: something before the orthogonalizer, something after it.


class Member:
    """`W <- (1 - phi) W - lr stretch after(orthogonalize(before(momentum)))`, with Nesterov's momentum."""

    beta = 0.95

    def __init__(self, W, *, orthogonalize, phi, stretch, **options):
        self.W, self.M = W.double().clone(), torch.zeros_like(W, dtype=torch.float64)
        self.orthogonalize, self.phi, self.stretch = orthogonalize, phi, stretch
        self.V, self.t = torch.zeros_like(self.W), 0
        vars(self).update(options)

    def before(self, ahead, G):
        del G
        return ahead

    def after(self, U):
        return U

    def step(self, G, lr):
        G = G.double()
        self.M = self.beta * self.M + (1 - self.beta) * G
        ahead = (1 - self.beta) * G + self.beta * self.M
        U = self.after(self.orthogonalize(self.before(ahead, G)))
        self.W = (1 - self.phi(lr)) * self.W - lr * self.stretch(*self.W.shape) * U
        self.t += 1


class NorMuon(Member):
    """Rows of (nearly) equal size, from section 3 of the paper."""

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

    def before(self, ahead, G):
        self.V = self.beta2 * self.V + (1 - self.beta2) * G**2
        return ahead / (self.V.sqrt() + self.eps)


class Signs(Member):
    def before(self, ahead, G):
        del G
        return torch.sign(ahead)


class Adapted(Member):
    """Directions divided by the root of their average square, of the norm of an orthogonal matrix in the end."""

    eps = 1e-8

    def after(self, U):
        self.V = self.beta * self.V + (1 - self.beta) * U**2
        divided = U / (self.V.sqrt() + self.eps)
        return divided * math.sqrt(min(U.shape)) / (divided.norm() + self.eps)


class AdaMuon(Signs, Adapted):
    pass


class Equalized(Member):
    """MuonEq: rows of one norm before the orthogonalization."""

    def before(self, ahead, G):
        del G
        return ahead * ahead.norm() / math.sqrt(len(ahead)) / ahead.norm(dim=1, keepdim=True)


class Snapped(Member):
    """Muon+: the norm of an orthogonal matrix after it."""

    def after(self, U):
        return U * math.sqrt(min(U.shape)) / U.norm()


class SoapMuon(Member):
    """Momentum whitened in the eigenbases of averages of G G^T and G^T G, after modded-nanogpt's track 3."""

    beta2, eps, period, Q = 0.9, 1e-8, 1, None

    def before(self, ahead, G):
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


# Algorithms of their own, with `step`.


@dataclass
class ReferenceLion:
    W: Tensor
    decay: Decay
    betas: tuple[float, float] = (0.9, 0.99)
    cautious: bool = False

    def __post_init__(self):
        self.W, self.M = self.W.double().clone(), torch.zeros_like(self.W, dtype=torch.float64)

    def step(self, G, eta):
        G, (b1, b2) = G.double(), self.betas
        C = b1 * self.M + (1 - b1) * G
        U = (C > 0).double() - (C < 0).double()
        self.M = b2 * self.M + (1 - b2) * G
        self.W = self.decay.move(self.W, G, U, eta, eta, self.cautious)


def stretched(scale, m, n):
    return 0.2 * max(m, n) ** 0.5 if scale == "match_rms_adamw" else (m / n) ** 0.5


@dataclass
class ReferenceDion2:
    W: Tensor
    decay: Decay
    fraction: float = 0.25
    mu: float = 0.95

    def __post_init__(self):
        self.W, self.M = self.W.double().clone(), torch.zeros_like(self.W, dtype=torch.float64)

    def step(self, G, eta):
        m, n = self.W.shape
        self.M = self.M + G.double()
        M = self.M if m <= n else self.M.T  # a view: what is written to it is written to self.M
        k = max(1, math.ceil(self.fraction * min(m, n)))
        chosen = sorted(range(min(m, n)), key=lambda i: -float(M[i].abs().sum()))[:k]
        polar = orthogonalize("polar_express_5", torch.stack([M[i] for i in chosen]))
        U = torch.zeros_like(M)
        for place, i in enumerate(chosen):
            U[i] = polar[place]
            M[i] *= self.mu
        U, scale = U if m <= n else U.T, stretched("match_rms_adamw", m, n)
        self.W = self.decay.move(self.W, G.double(), U, eta, eta * scale, cautious=False)


@dataclass
class ReferenceMuonBP:
    """Heavy ball without Nesterov, as the paper has it; `sizes` are those of the blocks along `axis`."""

    W: Tensor
    decay: Decay
    sizes: tuple[int, ...]
    period: int
    axis: int = 0
    stretch: str = "match_rms_adamw"

    def __post_init__(self):
        self.W, self.M, self.t = self.W.double().clone(), torch.zeros_like(self.W, dtype=torch.float64), 0

    def step(self, G, eta):
        self.t += 1
        self.M = 0.95 * self.M + G.double()
        blocks = [self.M] if self.t % self.period == 0 else self.M.split(self.sizes, self.axis)
        moves = torch.cat([ns5(block) * stretched(self.stretch, *block.shape) for block in blocks], self.axis)
        self.W = self.decay.move(self.W, G.double(), moves, eta, eta, cautious=False)


# Algorithms with factors: `direction` is what is multiplied by the learning rate and subtracted from the weight.


def inverse_sqrt(S):
    values, Q = torch.linalg.eigh(S)
    return Q @ torch.diag(values**-0.5) @ Q.T


class ReferenceASGO:
    def __init__(self, shape, b1=0.9, b2=0.8):
        self.b1, self.b2 = b1, b2
        self.M, self.V = torch.zeros(shape, dtype=torch.float64), 0.0

    def direction(self, G):
        m, n = G.shape
        self.M = self.b1 * self.M + (1 - self.b1) * G
        self.V = self.b2 * self.V + (1 - self.b2) * (G @ G.T if m < n else G.T @ G)
        U = inverse_sqrt(self.V) @ self.M if m < n else self.M @ inverse_sqrt(self.V)
        return 0.2 * (m * n) ** 0.5 * U / U.norm()


class ReferenceKLShampoo:
    """As its authors' README writes it."""

    def __init__(self, shape, b1=0.9684, b2=0.9482, eps=1e-9):
        self.b1, self.b2, self.eps = b1, b2, eps
        self.M = torch.zeros(shape, dtype=torch.float64)
        self.S = self.P = None

    def direction(self, G):
        (m, n), b1, b2, eps = G.shape, self.b1, self.b2, self.eps
        I_m, I_n = torch.eye(m, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
        if self.S is None:
            S_a, S_b = (m / (n * (G**2).sum() + eps)) ** 0.5 * G @ G.T, (n / (m * (G**2).sum() + eps)) ** 0.5 * G.T @ G
            self.S = S_a + (S_a.norm() / m**0.5 + eps) * I_m, S_b + (S_b.norm() / n**0.5 + eps) * I_n
            self.P = inverse_sqrt(self.S[0]), inverse_sqrt(self.S[1])
        self.M = b1 * self.M + (1 - b1) * G
        N = (1 - b1) * G + b1 * self.M
        (S_a, S_b), (P_a, P_b) = self.S, self.P
        self.S = (
            b2 * S_a + (1 - b2) / n * (G @ P_b) @ (G @ P_b).T + eps * I_m,
            b2 * S_b + (1 - b2) / m * (P_a @ G).T @ (P_a @ G) + eps * I_n,
        )
        self.P = inverse_sqrt(self.S[0]), inverse_sqrt(self.S[1])
        c = ((1 - b1) / (1 + b1) * (1 + 2 * b1 - 2 * b1**3)) ** -0.5
        return c * (m / n) ** 0.5 / (m**0.5 + n**0.5) * self.P[0] @ N @ self.P[1]


class ReferenceShampoo:
    """With blocks and grafting as Meta's `distributed_shampoo` computes it; `blocks` are pairs of slices."""

    def __init__(self, blocks, b1=0.9, b2=0.999, bs=None, eps=1e-12, eps_graft=1e-8, f=1, grafting="adam"):
        self.b1, self.b2, self.bs, self.f, self.t = b1, b2, b2 if bs is None else bs, f, 0
        self.eps, self.eps_graft, self.grafting = eps, eps_graft, grafting
        self.blocks = [(cut, {}) for cut in blocks]

    def direction(self, G):
        self.t += 1
        P = torch.zeros_like(G, dtype=torch.float64)
        for cut, state in self.blocks:
            P[cut] = self.block(state, G[cut])
        return P

    def block(self, s, G):
        t = self.t
        s["L"] = self.learned(s.get("L", 0), G @ G.T)
        s["R"] = self.learned(s.get("R", 0), G.T @ G)
        s["M"] = self.b1 * s.get("M", 0) + (1 - self.b1) * G
        s["v"] = self.b2 * s.get("v", 0) + (1 - self.b2) * G**2
        M = s["M"] / (1 - self.b1**t)
        graft = M / ((s["v"] / (1 - self.b2**t)) ** 0.5 + self.eps_graft) if self.grafting == "adam" else M
        if t % self.f == 0:
            s["roots"] = self.root(s["L"]), self.root(s["R"])
        if "roots" not in s:
            return graft
        P = s["roots"][0] @ M @ s["roots"][1]
        return P if self.grafting is None else P * graft.norm() / (P.norm() + 1e-16)

    def learned(self, A, new):
        return A + new if self.bs == 1 else self.bs * A + (1 - self.bs) * new

    def root(self, A):
        A = A / (1 - self.bs**self.t) if self.bs < 1 else A
        values, Q = torch.linalg.eigh(A + self.eps * torch.eye(len(A), dtype=torch.float64))
        if values.min() < self.eps:
            values = values - values.min() + self.eps
        return Q @ torch.diag(values**-0.25) @ Q.T


class ReferenceSOAP:
    """As its authors' file computes it."""

    def __init__(self, shape, b1=0.95, b2=0.95, bs=None, eps=1e-8, f=10, longest=10000):
        self.b1, self.b2, self.bs, self.eps, self.f = b1, b2, b2 if bs is None else bs, eps, f
        self.rotated = [length <= longest for length in shape]
        self.factors = [zeros(length) for length in shape]
        self.m = self.v = torch.zeros(shape, dtype=torch.float64)
        self.bases, self.t = None, 0

    def direction(self, G):
        if self.bases is None:
            self.learn(G)
            pairs = zip(self.factors, self.rotated, strict=True)
            self.bases = [torch.linalg.eigh(A)[1].flip(1) if yes else torch.eye(len(A)).double() for A, yes in pairs]
            return torch.zeros_like(G)
        self.t += 1
        left, right = self.bases
        P = left.T @ G @ right
        self.m, self.v = self.b1 * self.m + (1 - self.b1) * P, self.b2 * self.v + (1 - self.b2) * P**2
        N = left @ (self.m / (self.v**0.5 + self.eps)) @ right.T
        self.learn(G)
        if self.t % self.f == 0:
            self.refresh()
        return (1 - self.b2**self.t) ** 0.5 / (1 - self.b1**self.t) * N

    def learn(self, G):
        grams = G @ G.T, G.T @ G
        self.factors = [self.bs * A + (1 - self.bs) * new for A, new in zip(self.factors, grams, strict=True)]

    def refresh(self):
        m = self.bases[0] @ self.m @ self.bases[1].T
        for axis, (A, yes) in enumerate(zip(self.factors, self.rotated, strict=True)):
            if yes:
                Q = self.bases[axis]
                order = torch.diag(Q.T @ A @ Q).argsort(descending=True)
                self.v = self.v.index_select(axis, order)
                self.bases[axis] = torch.linalg.qr(A @ Q[:, order]).Q
        self.m = self.bases[0].T @ m @ self.bases[1]
