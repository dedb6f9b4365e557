"""Matrices whose singular values are known by construction."""

import torch


def rotation(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]


def with_spectrum(spectrum, columns, seed=0):
    """A wide float64 matrix with these singular values; its polar factor is that of `spectrum > 0`."""
    rows = len(spectrum)
    return (rotation(rows, seed) * spectrum) @ rotation(columns, seed + 1)[:rows]
