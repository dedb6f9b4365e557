"""Shape scales: by how much an orthogonal direction is stretched before the learning rate multiplies it.

An orthogonal (m, n) matrix has entries of RMS `1/sqrt(max(m, n))`, so without a scale large matrices would
move less than small ones. Each scale is a function of (rows, columns) = (out, in).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from muonsw.registry import Registry

ShapeScale = Callable[[int, int], float]

# The RMS of a typical AdamW update (Liu et al. 2025, "Muon is scalable for LLM training").
ADAMW_RMS = 0.2


def match_rms_adamw(rows: int, columns: int) -> float:
    """0.2 sqrt(max(m, n)): entries of RMS 0.2, so that AdamW's learning rate can be used."""
    return ADAMW_RMS * math.sqrt(max(rows, columns))


def original(rows: int, columns: int) -> float:
    """sqrt(max(1, m/n)), Jordan's Muon and the default of `torch.optim.Muon`."""
    return math.sqrt(max(1.0, rows / columns))


def spectral(rows: int, columns: int) -> float:
    """sqrt(m/n): the spectral condition of muP, equal change of activations at every width."""
    return math.sqrt(rows / columns)


def unscaled(rows: int, columns: int) -> float:  # noqa: ARG001
    """1: the direction itself, as in the convergence theory."""
    return 1.0


SHAPE_SCALES: Registry[ShapeScale] = Registry("shape scale")
SHAPE_SCALES.register("match_rms_adamw", match_rms_adamw)
SHAPE_SCALES.register("original", original)
SHAPE_SCALES.register("spectral", spectral)
SHAPE_SCALES.register("none", unscaled)
