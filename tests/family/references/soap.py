"""SOAP as its authors' file computes it, in float64, one matrix at a time."""

import torch


class ReferenceSOAP:
    def __init__(self, shape, b1=0.95, b2=0.95, bs=None, eps=1e-8, f=10, longest=10000):
        self.b1, self.b2, self.bs, self.eps, self.f = b1, b2, b2 if bs is None else bs, eps, f
        self.rotated = [length <= longest for length in shape]
        self.factors = [torch.zeros(length, length, dtype=torch.float64) for length in shape]
        self.bases = None
        self.m = self.v = torch.zeros(shape, dtype=torch.float64)
        self.t = 0

    def direction(self, G):
        """What is multiplied by the learning rate and subtracted from the weight."""
        G = G.double()
        if self.bases is None:
            self.learn(G)
            self.bases = [self.eigenvectors(A) if yes else torch.eye(len(A)).double() for A, yes in self.sides()]
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

    def sides(self):
        return zip(self.factors, self.rotated, strict=True)

    def learn(self, G):
        grams = G @ G.T, G.T @ G
        self.factors = [self.bs * A + (1 - self.bs) * new for A, new in zip(self.factors, grams, strict=True)]

    def eigenvectors(self, A):
        values, vectors = torch.linalg.eigh(A)
        return vectors[:, values.argsort(descending=True)]

    def refresh(self):
        m = self.bases[0] @ self.m @ self.bases[1].T
        for axis, (A, yes) in enumerate(self.sides()):
            if yes:
                Q = self.bases[axis]
                order = torch.diag(Q.T @ A @ Q).argsort(descending=True)
                self.v = self.v.index_select(axis, order)
                self.bases[axis] = torch.linalg.qr(A @ Q[:, order]).Q
        self.m = self.bases[0].T @ m @ self.bases[1]
