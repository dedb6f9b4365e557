"""ASGO with an exact root, in float64, one matrix at a time."""

import torch


class ReferenceASGO:
    def __init__(self, shape, b1=0.9, b2=0.8):
        self.b1, self.b2 = b1, b2
        self.M, self.V = torch.zeros(shape, dtype=torch.float64), 0.0

    def direction(self, G):
        """What is multiplied by the learning rate and subtracted from the weight."""
        G = G.double()
        m, n = G.shape
        self.M = self.b1 * self.M + (1 - self.b1) * G
        self.V = self.b2 * self.V + (1 - self.b2) * (G @ G.T if m < n else G.T @ G)
        values, Q = torch.linalg.eigh(self.V)
        root = Q @ torch.diag(values**-0.5) @ Q.T
        U = root @ self.M if m < n else self.M @ root
        return 0.2 * (m * n) ** 0.5 * U / U.norm()
