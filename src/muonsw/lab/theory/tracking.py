"""A measured history of the weight norm beside its theory: the target, the lag, and the recursion replayed.

Update n turns the norm `r_n` into `r_(n+1)`; a sample at step n holds `r_n` as it was before that update, with
the update's size `s_n`, its decay factor `phi_n` and its alignment `a_n`. Signs and symbols are those of
`muonsw.lab.theory.steady_state`. The alignment is the measured one, so whatever momentum does to it is inside.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from muonsw.lab.theory.hypotheses import require, require_at_least, require_positive
from muonsw.lab.theory.sampled import WINDOW, interpolate, window_in_steps, windowed_line
from muonsw.lab.theory.steady_state import next_norm, relaxation_times, steady_state_norm

Samples: TypeAlias = Sequence[float] | Tensor

# A norm follows its target while it is within a fifth of it. To first order ln r lags ln r* by the adiabatic ratio,
# so this is the size at which "far below 1" ends.
LAG = 0.2
# Steps whose coefficients are in memory at a time.
BLOCK = 2**16


@dataclass(frozen=True, eq=False)
class NormHistory:
    """Samples of the norm in the order of their steps, every step or every few."""

    steps: Tensor  # which updates were sampled, increasing
    r: Tensor  # RMS of the weight before the update
    s: Tensor  # RMS of the update
    phi: Tensor  # decay factor of the step
    a: Tensor  # cosine between weight and update

    @classmethod
    def of(cls, steps: Samples, *, r: Samples, s: Samples, phi: Samples, a: Samples) -> "NormHistory":
        """From numbers or tensors, as float64 on the CPU."""
        columns = [torch.as_tensor(x, dtype=torch.float64, device="cpu") for x in (steps, r, s, phi, a)]
        require("equally many samples of each", len({len(x) for x in columns}) == 1)
        require("at least one sample", len(columns[0]) > 0)
        for name, column in zip(("steps", "r", "s", "phi", "a"), columns, strict=True):
            require(f"{name} is finite", column.isfinite())
        require("steps increase", columns[0].diff() > 0)
        return cls(columns[0].long(), *columns[1:])

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, eq=False)
class Tracking:
    """What theory says about a history, sample by sample; see `track`."""

    target: Tensor  # the quasi-steady norm r*; not a number where the step did not decay or did not move
    smooth_target: Tensor  # the same with the noise of single alignments averaged out
    ratio: Tensor  # adiabatic ratio `tau |d ln r*/dt|`, with tau for an alignment that follows s/r
    lag: Tensor  # `ln(r / smooth_target)`: how far the norm is from where it would settle
    broke_at: int | None  # step from which the lag exceeds a fifth to the end; None if the norm still follows
    predicted: Tensor  # the recursion from the first observed norm


def track(history: NormHistory, *, window: float = WINDOW) -> Tracking:
    """Compare a history of the norm with its theory; ln r* is fitted by lines over `window` of the run.

    The ratio is the cause of a break and the lag its effect. A cosine flattens at its end, so the target stands still
    there and the ratio returns to zero, while the norm may no longer have the time to catch up; the lag shows that.

    Examples:
        >>> steps = range(1, 1001, 10)
        >>> still = dict(s=[0.01] * 100, phi=[0.005] * 100, a=[0.0] * 100)
        >>> tracking = track(NormHistory.of(steps, r=[0.1] * 100, **still))
        >>> float(tracking.target[-1]), tracking.broke_at
        (0.1, None)
    """
    target, width = target_norms(history), window_in_steps(history.steps, window)
    smooth, slope = windowed_line(history.steps, target.log(), width)
    # Where decay or update is zero, the slope and the ratios are not a number.
    tau, _ = relaxation_times(s=history.s, phi=history.phi, r_star=target)
    lag = history.r.log() - smooth
    return Tracking(
        target=target,
        smooth_target=smooth.exp(),
        ratio=tau * slope.abs(),
        lag=lag,
        broke_at=tracking_break(history.steps, lag, after=peak_decay_step(history), lasting=width / 2),
        predicted=predict_norms(history),
    )


def target_norms(history: NormHistory) -> Tensor:
    """The quasi-steady norm r* at every sample, not a number where decay or update is zero."""
    defined = (history.phi > 0.0) & (history.s > 0.0)
    targets = torch.full_like(history.r, torch.nan)
    targets[defined] = steady_state_norm(s=history.s[defined], phi=history.phi[defined], a=history.a[defined])
    return targets


def peak_decay_step(history: NormHistory) -> int:
    """The first sampled step at which decay was at its peak (within a thousandth): the end of warmup."""
    at_peak = history.phi >= history.phi.max() * (1.0 - 1e-3)
    return int(history.steps[at_peak][0])


def tracking_break(steps: Tensor, lag: Tensor, *, after: int, lasting: float) -> int | None:
    """The step from which the lag stays above a fifth to the end; None if there is none.

    Steps up to `after` do not count: during warmup the target moves by design. The lag must have stayed above for
    `lasting` steps. Half the window of the fit keeps a few noisy samples at the end, whose windows overlap, from
    counting as a break.
    """
    counts = lag.isfinite() & (steps > after)
    steps, above = steps[counts], lag[counts].abs() > LAG
    below = (~above).nonzero().flatten()
    first = int(below[-1]) + 1 if len(below) else 0
    if first >= len(steps) or float(steps[-1] - steps[first]) < lasting:
        return None
    return int(steps[first])


def predict_norms(history: NormHistory) -> Tensor:
    """Replay the recursion from the first observed norm; between samples s, phi and a are interpolated linearly.

    Only the first observed norm enters, so an error of the recursion adds up instead of being forgiven.
    """
    sampled, last = set(history.steps.tolist()), int(history.steps[-1])
    norms, norm = [], float(history.r[0])
    for begin in range(int(history.steps[0]), last, BLOCK):
        steps = torch.arange(begin, min(begin + BLOCK, last), dtype=torch.int64, device=history.steps.device)
        coefficients = (interpolate(history.steps, x, steps).tolist() for x in (history.s, history.phi, history.a))
        for now, s, phi, a in zip(steps.tolist(), *coefficients, strict=True):
            if now in sampled:
                norms.append(norm)
            norm = next_norm(norm, s=s, phi=phi, a=a)
    return history.r.new_tensor([*norms, norm])


def steady_state_norm_with_memory(*, s: float, phi: float, memory: float) -> float:
    """The steady state where the alignment follows the norm, `a = -(memory - 1) s/(2 r)`: `s sqrt(memory/(2 phi))`.

    The memory `1 - 2 a r/s` is how many times its own square an update adds to the squared norm: 1 for updates without
    relation to the weight, `(1 + beta)/(1 - beta)` for independent gradients averaged with coefficient beta. Unlike a
    it does not depend on where the norm is, so this answers what another decay would do.

    Hypotheses: s >= 0, phi > 0, memory >= 0.
    """
    require_at_least("s", s, 0)
    require_positive("phi", phi)
    require_at_least("memory", memory, 0)
    return float(s * (memory / (2.0 * phi)) ** 0.5)
