"""Muon^2 in float64, one matrix and one element at a time."""

import math

import torch


class Muon2:
    """Muon on momentum that is divided by the root of the average squared gradient."""

    def __init__(self, W, *, orthogonalize, phi, stretch, beta=0.95, beta2=0.95, eps=1e-10):
        self.W, self.M = W.double().clone(), torch.zeros_like(W, dtype=torch.float64)
        self.orthogonalize, self.phi, self.stretch = orthogonalize, phi, stretch
        self.beta, self.beta2, self.eps = beta, beta2, eps
        self.V = torch.zeros_like(self.W)

    def step(self, G, lr):
        G = G.double()
        self.M = self.beta * self.M + (1 - self.beta) * G
        ahead = (1 - self.beta) * G + self.beta * self.M
        for i in range(G.shape[0]):
            for j in range(G.shape[1]):
                self.V[i, j] = self.beta2 * self.V[i, j] + (1 - self.beta2) * G[i, j] ** 2
                ahead[i, j] /= math.sqrt(self.V[i, j]) + self.eps
        self.W = (1 - self.phi(lr)) * self.W - lr * self.stretch(*self.W.shape) * self.orthogonalize(ahead)
