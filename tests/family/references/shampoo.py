"""Shampoo with blocks and grafting as Meta's `distributed_shampoo` computes it, in float64, one block at a time."""

import torch


class ReferenceShampoo:
    def __init__(self, blocks, b1=0.9, b2=0.999, bs=None, eps=1e-12, eps_graft=1e-8, f=1, grafting="adam"):
        """`blocks` are pairs of slices that cover the matrix."""
        self.b1, self.b2, self.bs, self.f, self.t = b1, b2, b2 if bs is None else bs, f, 0
        self.eps, self.eps_graft, self.grafting = eps, eps_graft, grafting
        self.blocks = {index: {} for index in range(len(blocks))}
        self.cuts = blocks

    def direction(self, G):
        """What is multiplied by the learning rate and subtracted from the weight."""
        self.t += 1
        P = torch.zeros_like(G, dtype=torch.float64)
        for index, cut in enumerate(self.cuts):
            P[cut] = self.block(self.blocks[index], G[cut].double())
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
