"""Thinning curves for a page without hiding what they do: first, last and extremes of each bin survive."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
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


def extremes(values: NDArray[np.float64], points: int) -> NDArray[np.int64]:
    """The places to keep of a curve: its ends, and the smallest and the largest value of each of equally long bins.

    Args:
        values: The curve; all finite.
        points: How many places are kept at most; a curve that is no longer stays whole.

    Examples:
        >>> extremes(np.array([5.0, 4.0, 9.0, 4.0, 1.0, 2.0, 3.0]), points=6).tolist()
        [0, 1, 2, 4, 6]
    """
    count = len(values)
    if count <= max(points, 4):
        return np.arange(count)
    bins = max(1, (points - 2) // 2)
    width = -(-count // bins)
    # The last bin is filled up with the last value, which is kept anyway.
    grid = np.pad(values, (0, -count % width), mode="edge").reshape(-1, width)
    starts = np.arange(len(grid)) * width
    found = np.concatenate([starts + grid.argmin(1), starts + grid.argmax(1), [0, count - 1]])
    return np.unique(np.minimum(found, count - 1))
