"""Thinning curves for a page without hiding what they do: first, last and extremes of each bin survive."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def log_extremes(values: Tensor, bins: int) -> tuple[list[int], list[list[float]]]:
    """Keep, in each of `bins` log-spaced bins of steps, the steps where some curve is extreme.

    All curves share their steps, so the extremes are those of the smallest and the largest curve; every kept
    value is a value of the run, never an average.

    Args:
        values: Shape (curves, steps); columns are counted from 1.
        bins: How many bins the logarithm of the steps is cut into; at most four steps are kept in each.

    Returns:
        The kept steps, and for each curve its values there.

    Examples:
        >>> log_extremes(torch.tensor([[5.0, 4.0, 9.0, 4.0, 1.0]]), bins=1)
        ([1, 3, 5], [[5.0, 9.0, 1.0]])
    """
    count = values.shape[1]
    edges = sorted({round(float(count**x)) for x in torch.linspace(0, 1, bins + 1, dtype=torch.float64)})
    low, high = values.amin(0), values.amax(0)
    kept = {1, count}
    for start, end in pairwise(edges):
        inside = slice(start - 1, end)
        kept |= {start, start + int(low[inside].argmin()), start + int(high[inside].argmax())}
    steps = sorted(kept)
    return steps, values[:, torch.tensor(steps) - 1].tolist()
