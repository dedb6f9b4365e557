"""Gradients that follow from a formula, so that recorded numbers need no generator of random numbers."""

import torch


def gradient(shape, step):
    """A matrix of full rank whose singular values are well apart, another one at every step."""
    rows, columns = (torch.arange(1, length + 1, dtype=torch.float64) for length in shape)
    phases = torch.outer(rows.sqrt(), columns) + torch.outer(rows**2, (columns + 2).sqrt()) + 1.7 * (step + 1)
    return torch.sin(3 * phases) + 0.3 * torch.cos((step + 2) * phases)


def start(shape):
    """The first weight."""
    return 0.1 * gradient(shape, -1)
