"""AdaMuon in float64, one matrix and one element at a time, and its two halves."""

import math

import torch


class AdaMuon:
    """Signs of momentum, orthogonalized, divided by the root of their average square, of RMS 0.2 in the end."""

    signs = adapts = True

    def __init__(self, W, *, orthogonalize, phi, stretch, beta=0.95, eps=1e-8):
        self.W, self.M = W.double().clone(), torch.zeros_like(W, dtype=torch.float64)
        self.orthogonalize, self.phi, self.stretch = orthogonalize, phi, stretch
        self.beta, self.eps = beta, eps
        self.V = torch.zeros_like(self.W)

    def step(self, G, lr):
        G = G.double()
        self.M = self.beta * self.M + (1 - self.beta) * G
        ahead = (1 - self.beta) * G + self.beta * self.M
        U = self.orthogonalize(torch.sign(ahead) if self.signs else ahead)
        U = self.adapted(U) if self.adapts else self.stretch(*U.shape) * U
        self.W = (1 - self.phi(lr)) * self.W - lr * U

    def adapted(self, U):
        m, n = U.shape
        divided = torch.zeros_like(U)
        for i in range(m):
            for j in range(n):
                self.V[i, j] = self.beta * self.V[i, j] + (1 - self.beta) * U[i, j] ** 2
                divided[i, j] = U[i, j] / (math.sqrt(self.V[i, j]) + self.eps)
        norm = math.sqrt(sum(float(u) ** 2 for u in divided.flatten()))
        return divided * 0.2 * math.sqrt(m * n) / (norm + self.eps)


class Signs(AdaMuon):
    """`precondition="sign"` alone."""

    adapts = False


class Adapted(AdaMuon):
    """`normalize="adamuon"` alone."""

    signs = False
