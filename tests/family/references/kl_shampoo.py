"""Online KL-Shampoo as its authors' README writes it, with exact roots, in float64, one matrix at a time."""

import torch


def inverse_sqrt(S):
    values, Q = torch.linalg.eigh(S)
    return Q @ torch.diag(values**-0.5) @ Q.T


class ReferenceKLShampoo:
    def __init__(self, shape, b1=0.9684, b2=0.9482, eps=1e-9):
        self.b1, self.b2, self.eps = b1, b2, eps
        self.M = torch.zeros(shape, dtype=torch.float64)
        self.S = self.P = None

    def direction(self, G):
        """What is multiplied by the learning rate and subtracted from the weight."""
        G = G.double()
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
