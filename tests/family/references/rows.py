"""MuonEq and Muon+ in float64, one matrix and one row at a time."""

import math

import torch


def norm(x):
    return math.sqrt(sum(float(element) ** 2 for element in x.flatten()))


class Equalized:
    """MuonEq: rows of one norm before the orthogonalization."""

    def __init__(self, W, *, orthogonalize, phi, stretch, beta=0.95):
        self.W, self.M = W.double().clone(), torch.zeros_like(W, dtype=torch.float64)
        self.orthogonalize, self.phi, self.stretch, self.beta = orthogonalize, phi, stretch, beta

    def direction(self, ahead):
        target = norm(ahead) / math.sqrt(len(ahead))
        return self.orthogonalize(torch.stack([row * target / norm(row) for row in ahead]))

    def step(self, G, lr):
        G = G.double()
        self.M = self.beta * self.M + (1 - self.beta) * G
        U = self.direction((1 - self.beta) * G + self.beta * self.M)
        self.W = (1 - self.phi(lr)) * self.W - lr * self.stretch(*self.W.shape) * U


class Snapped(Equalized):
    """Muon+: the norm of an orthogonal matrix after it."""

    def direction(self, ahead):
        U = self.orthogonalize(ahead)
        return U * math.sqrt(min(U.shape)) / norm(U)
