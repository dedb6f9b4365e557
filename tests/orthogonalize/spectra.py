"""Matrices with given singular values."""

import torch


def rotation(size, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))[0]


def with_spectrum(spectrum, columns, seed=0):
    """A wide float64 matrix with these singular values; its polar factor is that of `spectrum > 0`."""
    rows = len(spectrum)
    return (rotation(rows, seed) * spectrum) @ rotation(columns, seed + 1)[:rows]


def hard_spectra(rows, log_condition):
    """Spectra on which an iteration without restarts fails."""
    decaying = torch.logspace(0, -log_condition, rows, dtype=torch.float64)
    one_large = torch.full((rows,), 10.0**-log_condition, dtype=torch.float64)
    one_large[0] = 1
    half_zero = torch.ones(rows, dtype=torch.float64)
    half_zero[rows // 2 :] = 0
    return [decaying, one_large, one_large.sqrt(), half_zero]


def mapped(coefficients, steps, sigma):
    """Singular values, relative to the Frobenius norm, after this many steps of a coefficient set."""
    for a, b, c in coefficients.schedule(steps):
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma
