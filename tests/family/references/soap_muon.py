"""SOAP-Muon in float64, one matrix at a time, after the file of modded-nanogpt's track 3."""

import torch


class SoapMuon:
    """Muon on momentum whitened in the eigenbases of averages of G G^T and G^T G."""

    def __init__(self, W, *, orthogonalize, phi, stretch, beta=0.95, beta2=0.9, eps=1e-8, period=1):
        self.W, self.M = W.double().clone(), torch.zeros_like(W, dtype=torch.float64)
        self.orthogonalize, self.phi, self.stretch = orthogonalize, phi, stretch
        self.beta, self.beta2, self.eps, self.period = beta, beta2, eps, period
        self.V, self.t, self.Q = torch.zeros_like(self.W), 0, None
        self.factors = [torch.zeros(size, size, dtype=torch.float64) for size in W.shape]

    def step(self, G, lr):
        G = G.double()
        self.M = self.beta * self.M + (1 - self.beta) * G
        ahead = (1 - self.beta) * G + self.beta * self.M
        if self.Q is not None:
            ahead = self.whitened(ahead)
        self.W = (1 - self.phi(lr)) * self.W - lr * self.stretch(*self.W.shape) * self.orthogonalize(ahead)
        for factor, product in zip(self.factors, (G @ G.T, G.T @ G), strict=True):
            factor.mul_(self.beta2).add_((1 - self.beta2) * product)
        if self.Q is None:
            self.Q = [torch.linalg.eigh(factor)[1].flip(1) for factor in self.factors]
        elif self.t % self.period == 0:
            self.follow()
        self.t += 1

    def whitened(self, ahead):
        left, right = self.Q
        rotated = left.T @ ahead @ right
        self.V = self.beta2 * self.V + (1 - self.beta2) * rotated**2
        return left @ (rotated / torch.clamp(self.V.sqrt(), min=self.eps)) @ right.T

    def follow(self):
        for side in (0, 1):
            Q, factor = self.Q[side], self.factors[side]
            order = torch.diag(Q.T @ factor @ Q).argsort(descending=True)
            self.V = self.V.index_select(side, order)
            self.Q[side] = torch.linalg.qr(factor @ Q[:, order])[0]
