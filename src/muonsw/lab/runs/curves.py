"""Curves of several runs: their median, a running mean, and fewer points without hiding an extreme."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from muonsw.lab.runs.run import Points


def median_curve(parts: Sequence[Points]) -> Points:
    """The median over curves at the steps that all of them have.

    Examples:
        >>> one, two = np.array([1, 2, 3]), np.array([2, 3, 4])
        >>> steps, middle = median_curve([(one, np.array([9.0, 1.0, 1.0])), (two, np.array([2.0, 4.0, 9.0]))])
        >>> steps.tolist(), middle.tolist()
        ([2, 3], [1.5, 2.5])
    """
    steps = parts[0][0]
    for other, _ in parts[1:]:
        if not np.array_equal(steps, other):
            steps = np.intersect1d(steps, other, assume_unique=True)
    rows = [values if len(at) == len(steps) else values[np.isin(at, steps)] for at, values in parts]
    return steps, np.median(np.stack(rows), axis=0)


def running_mean(values: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """The mean over a centred window of that share of the values; windows are cut off at the ends.

    Examples:
        >>> running_mean(np.array([0.0, 3.0, 0.0, 3.0]), share=0.75).tolist()
        [1.5, 1.0, 2.0, 1.5]
    """
    half, places = int(share * len(values) / 2), np.arange(len(values))
    width = 2 * half + 1
    # A window is the end of one block of its width and the beginning of the next: differences of sums over all values
    # would carry the rounding of one that is huge into every later window.
    blocks = np.pad(values, (half, half + (-len(values) - 2 * half) % width)).reshape(-1, width)
    ends, beginnings = blocks[:, ::-1].cumsum(axis=1)[:, ::-1].ravel(), blocks.cumsum(axis=1).ravel()
    beginnings[width - 1 :: width] = 0.0  # where a window is a whole block
    count = np.minimum(places + half + 1, len(values)) - np.maximum(places - half, 0)
    return np.asarray((ends[places] + beginnings[places + width - 1]) / count)


def extremes(values: NDArray[np.float64], points: int) -> NDArray[np.int64]:
    """So many places at most to keep of a finite curve: its ends, and the extremes of each of equally long bins.

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
