"""NorMuon in float64, one matrix and one row at a time, from section 3 of the paper."""

import math

import torch


class NorMuon:
    """`W <- (1 - phi) W - lr stretch U`, where U has rows of (nearly) equal size."""

    def __init__(self, W, *, orthogonalize, phi, stretch, beta=0.95, beta2=0.95, eps=1e-10, longer=False, snap=False):
        self.W, self.M = W.double().clone(), torch.zeros_like(W, dtype=torch.float64)
        self.orthogonalize, self.phi, self.stretch = orthogonalize, phi, stretch
        self.beta, self.beta2, self.eps = beta, beta2, eps
        self.snap = snap
        self.flip = longer and W.shape[0] < W.shape[1]
        self.V = [0.0] * (W.shape[1] if self.flip else W.shape[0])

    def step(self, G, lr):
        G = G.double()
        self.M = self.beta * self.M + (1 - self.beta) * G
        U = self.orthogonalize((1 - self.beta) * G + self.beta * self.M)
        if self.snap:
            U = U * math.sqrt(min(U.shape)) / math.sqrt(sum(float(u) ** 2 for u in U.flatten()))
        U = self.normalized(U.T).T if self.flip else self.normalized(U)
        self.W = (1 - self.phi(lr)) * self.W - lr * self.stretch(*self.W.shape) * U

    def normalized(self, U):
        norm = math.sqrt(sum(float(u) ** 2 for u in U.flatten()))
        rows = []
        for i, row in enumerate(U):
            mean_square = sum(float(u) ** 2 for u in row) / len(row)
            self.V[i] = self.beta2 * self.V[i] + (1 - self.beta2) * mean_square
            rows.append(row / (math.sqrt(self.V[i]) + self.eps))
        divided = torch.stack(rows)
        after = math.sqrt(sum(float(u) ** 2 for u in divided.flatten()))
        return divided * norm / (after + self.eps)
