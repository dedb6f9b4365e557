"""Learning-rate schedules, as plain functions of the step and as torch schedulers.

A schedule maps a step to a multiple of the peak learning rate, a number in [0, 1]. All share these conventions:

* steps count from 0, so a run of `total_steps` takes the steps 0 to `total_steps - 1`;
* warmup reaches 1 at its last step, `warmup_steps - 1`; its first step is not zero;
* the rate reaches `final_fraction` at the last step of the run and stays there;
* every schedule reaches 1, so the peak of the run is the optimizer's `lr`.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

# See `schedule_of`.
SHAPES = ("cosine", "wsd", "constant")
# Sums over longer runs take this many evenly spaced steps; the curves are smooth, so the error is below 1e-4.
MOST_STEPS = 20_000


def warmup_cosine(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    final_fraction: float = 0.1,
) -> float:
    """Warm up to the peak, then follow half a cosine down to a fraction of it.

    Args:
        step: The step, from 0.
        total_steps: Steps in the run. A run of one step takes it at the peak.
        warmup_steps: Steps of warmup; 0 and 1 both start at the peak.
        final_fraction: The share of the peak that is left at the last step and after it.

    Examples:
        >>> [round(warmup_cosine(t, total_steps=8, warmup_steps=4), 3) for t in range(8)]
        [0.25, 0.5, 0.75, 1.0, 0.868, 0.55, 0.232, 0.1]
    """
    _check(step, total_steps, warmup_steps, final_fraction)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    share = (1.0 - math.cos(math.pi * _progress(step, max(warmup_steps - 1, 0), total_steps))) / 2.0
    return 1.0 - share + final_fraction * share


def warmup_stable_decay(
    step: int,
    *,
    total_steps: int,
    warmup_steps: int = 0,
    decay_fraction: float = 0.2,
    final_fraction: float = 0.1,
) -> float:
    """Warm up to the peak, hold it, and fall in a straight line over the last part of the run (WSD).

    `decay_fraction` is the share of the steps that fall. The other settings are those of `warmup_cosine`.

    Examples:
        >>> settings = dict(total_steps=8, warmup_steps=2, decay_fraction=0.4)
        >>> [round(warmup_stable_decay(t, **settings), 3) for t in range(8)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.7, 0.4, 0.1]
    """
    _check(step, total_steps, warmup_steps, final_fraction)
    if not 0.0 < decay_fraction <= 1.0:
        raise ValueError(f"decay_fraction must be in (0, 1], got {decay_fraction}; final_fraction=1 gives no decay")
    decay_steps = min(max(1, round(decay_fraction * total_steps)), total_steps - 1)
    if max(warmup_steps, 1) + decay_steps > total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} and decay_fraction={decay_fraction} ({decay_steps} steps) "
            f"do not fit into total_steps={total_steps}; shorten one of them"
        )
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    share = _progress(step, total_steps - 1 - decay_steps, total_steps)
    return 1.0 - share + final_fraction * share


def _check(step: int, total_steps: int, warmup_steps: int, final_fraction: float) -> None:
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}; the first step of a run is 0")
    _check_positive("total_steps", total_steps)
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"warmup_steps={warmup_steps} must be at least 0 and less than total_steps={total_steps}; "
            "warmup_steps_for_horizon(total_steps) gives a length that fits"
        )
    if not 0.0 <= final_fraction <= 1.0:
        raise ValueError(f"final_fraction is a fraction of the peak and must be in [0, 1], got {final_fraction}")


def _progress(step: int, start: int, total_steps: int) -> float:
    """The share of the way from the step `start` to the last step: 0 before it, 1 after the end."""
    return min(max((step - start) / max(total_steps - 1 - start, 1), 0.0), 1.0)


def _check_positive(argument: str, steps: int) -> None:
    if steps < 1:
        raise ValueError(f"{argument} must be at least 1, got {steps}")


def schedule_of(
    shape: str,
    total_steps: int,
    *,
    warmup_steps: int | None = None,
    final_fraction: float = 0.1,
    decay_fraction: float = 0.2,
) -> Callable[[int], float]:
    """The schedule with this name: "cosine", "wsd", or "constant" (flat after warmup).

    `warmup_steps` defaults to `warmup_steps_for_horizon`.

    Examples:
        >>> [round(schedule_of("cosine", 5, warmup_steps=1)(step), 2) for step in range(5)]
        [1.0, 0.87, 0.55, 0.23, 0.1]
    """
    if shape not in SHAPES:
        raise ValueError(f"schedule={shape!r} must be one of {', '.join(SHAPES)}")
    shared: dict[str, Any] = {
        "total_steps": total_steps,
        "warmup_steps": warmup_steps_for_horizon(total_steps) if warmup_steps is None else warmup_steps,
        "final_fraction": 1.0 if shape == "constant" else final_fraction,
    }
    if shape == "wsd":
        return partial(warmup_stable_decay, decay_fraction=decay_fraction, **shared)
    return partial(warmup_cosine, **shared)


def sampled(schedule: Callable[[int], float], total_steps: int) -> list[float]:
    """The multiples at every step, or at `MOST_STEPS` evenly spaced steps; the last step is always included."""
    count = min(total_steps, MOST_STEPS)
    steps = [(2 * number + 1) * total_steps // (2 * count) for number in range(count - 1)] + [total_steps - 1]
    return [schedule(step) for step in steps]


def lr_scheduler(optimizer: Optimizer, schedule: Callable[..., float], **settings: Any) -> LambdaLR:
    """Drive an optimizer's learning rate by a schedule from this module or a similar function.

    Every param group keeps its own peak, the `lr` it was built with. Settings are checked before the optimizer is
    touched. `state_dict` does not hold them: a resumed run follows the settings given here, and may be longer.

    Examples:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.02)
        >>> scheduler = lr_scheduler(optimizer, warmup_cosine, total_steps=100, warmup_steps=10)
        >>> scheduler.get_last_lr()
        [0.002]
    """
    multiple = partial(schedule, **settings)
    multiple(0)
    return LambdaLR(optimizer, multiple)


def peak_lr_for_horizon(total_steps: int, *, base_lr: float = 0.02, base_steps: int = 5000) -> float:
    """Transfer a peak learning rate tuned on one horizon to a longer one: `base_lr * (T / T0) ** (-1/3)`.

    The defaults are the paper's. Count steps at the batch size of the tuned run. Runs shorter than `base_steps` get
    `base_lr`: the rule would give more, but nothing was measured there, and too large a rate is dangerous.

    Examples:
        >>> f"{peak_lr_for_horizon(40_000):.3f}"  # eight times the steps, half the rate
        '0.010'
        >>> peak_lr_for_horizon(500)
        0.02
    """
    _check_positive("total_steps", total_steps)
    _check_positive("base_steps", base_steps)
    if not 0.0 < base_lr < math.inf:
        raise ValueError(f"base_lr must be positive and finite, got {base_lr}")
    return float(base_lr * max(1.0, total_steps / base_steps) ** (-1.0 / 3.0))


def warmup_steps_for_horizon(total_steps: int) -> int:
    """Warmup steps of a run: 1% of it, at least 1000, at most a tenth of it.

    Examples:
        >>> [warmup_steps_for_horizon(steps) for steps in (600, 35_000, 376_000)]
        [60, 1000, 3760]
    """
    _check_positive("total_steps", total_steps)
    return min(max(1000, total_steps // 100), total_steps // 10)
