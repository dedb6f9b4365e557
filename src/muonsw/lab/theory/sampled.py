"""Curves that were sampled every few steps: lines through a moving window, and values in between."""

import torch
from torch import Tensor

from muonsw.lab.theory.hypotheses import require

# Share of the run that a window covers.
WINDOW = 0.1
MIN_SAMPLES = 3


def window_in_steps(steps: Tensor, share: float = WINDOW) -> float:
    """The window as a number of steps: a share of the run, but wide enough for five samples."""
    require("0 < share <= 1", 0.0 < share <= 1.0, share=share)
    if len(steps) < 2:
        return 0.0
    return max(share * float(steps[-1] - steps[0]), 4.0 * float(steps.diff().double().median()))


def windowed_line(steps: Tensor, values: Tensor, window: float) -> tuple[Tensor, Tensor]:
    """Height and slope of the least-squares line through a window of that many steps centred on each sample.

    Towards either end of the run the window is cut off there, so that the slope is that of a time up to a
    quarter of a window further inside. Samples that are not finite are left out; where fewer than three remain
    both are not a number.
    """
    known, nothing = values.isfinite(), torch.full_like(values, torch.nan, dtype=torch.float64)
    x, y = steps[known].double(), values[known].double()
    if len(x) < MIN_SAMPLES:
        return nothing, nothing
    # Sums of centred numbers: the slope is a difference of sums, which would cancel otherwise.
    at = (steps.double() - x.mean()) / (x[-1] - x[0])
    u, v = at[known], y - y.mean()
    low = torch.searchsorted(x, steps.double() - window / 2, right=False)
    high = torch.searchsorted(x, steps.double() + window / 2, right=True)
    n = (high - low).double().clamp(min=1.0)

    def mean(z: Tensor) -> Tensor:
        sums = torch.cat([z.new_zeros(1), z.cumsum(0)])
        return (sums[high] - sums[low]) / n

    slope = (mean(u * v) - mean(u) * mean(v)) / (mean(u * u) - mean(u) ** 2)
    height = mean(v) + slope * (at - mean(u)) + y.mean()
    enough = known & (high - low >= MIN_SAMPLES)
    return torch.where(enough, height, nothing), torch.where(enough, slope / (x[-1] - x[0]), nothing)


def interpolate(steps: Tensor, values: Tensor, at: Tensor) -> Tensor:
    """Values at further steps between the first and the last, along straight lines."""
    if len(steps) == 1:
        return values.expand(len(at))
    right = torch.searchsorted(steps, at, right=True).clamp(1, len(steps) - 1)
    share = (at - steps[right - 1]).double() / (steps[right] - steps[right - 1]).double()
    return torch.lerp(values[right - 1].double(), values[right].double(), share)
