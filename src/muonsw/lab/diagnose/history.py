"""What one run recorded of one part of its weights, with theory beside it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muonsw.lab.base.errors import UsageError
from muonsw.lab.runs import Points, Run, last, norm_history
from muonsw.lab.theory import HypothesisError, NormHistory, Tracking, steady_state_norm_with_memory, target_norms, track
from muonsw.lab.theory.sampled import window_in_steps, windowed_line

Array = NDArray[np.float64]
# The paper fits the alignment over the last 50,000 of 376,000 steps.
LATE = 0.133
# Beyond are damaged records, and float64 weights that diverged: squares and sums of such values would overflow.
LARGEST = 1e100
# Rules whose decay factor falls with the learning rate, and with its square.
LINEAR, QUADRATIC = ("constant", "independent"), ("scaled", "squared")


@dataclass(frozen=True, eq=False)
class History:
    """The telemetry of one scope of a run: `decayed`, `all`, `role:NAME`, `layer:NUMBER` or `parameter:NAME`."""

    run: Run
    scope: str = "decayed"

    @property
    def name(self) -> str:
        """Which role, layer or parameter it is."""
        return self.scope.partition(":")[2]

    @cached_property
    def steps(self) -> NDArray[np.int64]:
        """The sampled updates."""
        return self.run.telemetry.scope(self.scope).step

    def column(self, key: str) -> Array:
        """One number for each sampled update, not a number where it is missing or has no square."""
        found = self.run.telemetry.scope(self.scope).get(key, np.full(len(self.steps), np.nan))
        return np.where(np.abs(found) < LARGEST, found, np.nan)

    def points(self, key: str) -> Points:
        """Steps and values of a column where it is known."""
        return self.run.telemetry.scope(self.scope).known(key)

    def last(self, key: str) -> float:
        """The last known value of a column; not a number where there is none."""
        return last(self.points(key))

    def highest(self, key: str) -> float:
        """The largest known value of a column; not a number where there is none."""
        known = _known(self.column(key))
        return float(known.max()) if len(known) else float("nan")

    def setting(self, name: str) -> Any:
        """A setting of the optimizer, None where the configuration does not say."""
        return (self.run.settings.get("optimizer") or {}).get(name)

    @property
    def momentum(self) -> float:
        """Muon's beta, or AdamW's first one."""
        beta = (self.setting("betas") or [None])[0] if self.setting("algorithm") == "adamw" else None
        return float(beta or self.setting("momentum") or 0.0)

    @property
    def planned_steps(self) -> int:
        """How many updates the run was to take, or those seen where nothing says so."""
        return self.run.planned_steps or self.run.steps

    @cached_property
    def norm(self) -> NormHistory | None:
        """The samples that have everything which theory needs, the complete ones; None where there are none."""
        return norm_history(self.run.telemetry.scope(self.scope))

    @property
    def complete(self) -> int:
        """How many samples are complete."""
        return 0 if self.norm is None else len(self.norm)

    @cached_property
    def tracking(self) -> Tracking | None:
        """Target, lag and prediction at the complete samples; None where theory does not apply."""
        if self.norm is None:
            return None
        try:
            return track(self.norm)
        except (HypothesisError, OverflowError):
            return None

    @cached_property
    def target(self) -> Array | None:
        """The steady state at the complete samples; None where there are none."""
        return None if self.norm is None else target_norms(self.norm).numpy()

    @cached_property
    def smooth_target(self) -> tuple[list[int], list[float]]:
        """Steps and smoothed steady state; both empty where nothing decays."""
        norm = self.norm
        if norm is None or not float(norm.phi.max()) > 0:
            return [], []
        height, _ = windowed_line(norm.steps, target_norms(norm).log(), window_in_steps(norm.steps))
        return norm.steps.tolist(), height.exp().tolist()

    @cached_property
    def relative_update(self) -> Array:
        """Update over weight RMS, as recorded, or from both where that was not."""
        recorded = self.column("relative_update")
        return np.where(np.isfinite(recorded), recorded, ratio(self.column("update_rms"), self.column("weight_rms")))

    @cached_property
    def peak_at(self) -> int:
        """Index of the last sample at which the learning rate was at its peak."""
        at_peak = np.flatnonzero(self.column("lr") >= self.highest("lr") * (1.0 - 1e-9))
        return int(at_peak[-1]) if len(at_peak) else 0

    @property
    def lr_left(self) -> float:
        """The last learning rate as a share of its peak."""
        peak = self.highest("lr")
        return self.last("lr") / peak if peak > 0 else float("nan")

    def late(self, share: float = LATE) -> NDArray[np.bool_]:
        """Samples in the last share of the steps."""
        if not len(self.steps):
            return np.zeros(0, dtype=np.bool_)
        chosen: NDArray[np.bool_] = self.steps > self.steps[-1] - share * (self.steps[-1] - self.steps[0])
        return chosen

    def typical(self, values: Array, where: NDArray[np.bool_] | None = None) -> float:
        """The median of the known values: unless said otherwise from the peak on, or all while the rate still rises."""
        if where is None:
            still_rising = self.peak_at == len(self.steps) - 1
            where = (np.arange(len(self.steps)) >= self.peak_at) | still_rising
        known = _known(values[where])
        return float(np.median(known)) if len(known) else float("nan")

    @cached_property
    def relaxations_so_far(self) -> Array:
        """`N = 2 sum(phi)` over all updates from the first sample to each; nothing adds up where decay is unknown."""
        known = np.isfinite(self.column("decay"))
        if not known.any():
            return np.full(len(self.steps), np.nan)
        steps, phi = self.steps[known], self.column("decay")[known]
        every = np.arange(self.steps[0], self.steps[-1] + 1)
        total = 2.0 * np.cumsum(np.interp(every, steps, phi, left=0.0, right=0.0))
        chosen: Array = total[self.steps - self.steps[0]]
        return chosen

    @property
    def relaxations(self) -> float:
        """How many relaxation times the run lasts, from the first sample to the last."""
        return float(self.relaxations_so_far[-1]) if len(self.steps) else float("nan")

    @cached_property
    def memory(self) -> float:
        """How many times its own square an update adds to the squared norm."""
        r, s, a = (self.column(key) for key in ("weight_rms", "update_rms", "alignment_update"))
        return self.typical(1.0 - ratio(2.0 * a * r, s))

    @cached_property
    def update(self) -> float:
        """RMS of an update at learning rate 1."""
        return self.typical(ratio(self.column("update_rms"), self.column("lr")))

    @cached_property
    def peak_lr(self) -> float:
        """The peak that scaled decay divides by, or the highest learning rate seen."""
        recorded = self.highest("peak_lr")
        return recorded if np.isfinite(recorded) else self.highest("lr")

    @cached_property
    def lam(self) -> float:
        """Lambda as it acted on these weights: from phi and the learning rate, under the run's rule."""
        lr, phi = self.column("lr"), self.column("decay")
        return self.typical(ratio(phi * self.peak_lr, lr**2) if self.run.rule in QUADRATIC else ratio(phi, lr))

    def held_norm(self) -> float:
        """Where scaled decay would hold the norm at this lambda and peak; not a number where that is unknown."""
        peak = self.highest("lr")
        if not (self.lam > 0 and peak > 0 and self.memory >= 0 and self.update > 0):
            return float("nan")
        return steady_state_norm_with_memory(s=self.update * peak, phi=self.lam * peak, memory=self.memory)


def open_history(run: Run, scope: str = "decayed") -> History:
    """The telemetry of a scope.

    Raises:
        UsageError: If the run recorded none, or not of this scope.
    """
    if not run.telemetry.records:
        none = (
            f"{run.path} holds no telemetry {'at all' if run.complete else 'so far'}, so there is nothing to diagnose"
        )
        raise UsageError(f"{none}; train with --telemetry-every 20, or another number above 0")
    known = run.telemetry.scopes()
    if scope not in known:
        offered = [name for name in known if not name.startswith("parameter:")]
        raise UsageError(f"{run.path} has no telemetry of {scope!r}; --scope can be {', '.join(offered)}")
    return History(run, scope)


def parts(run: Run, kind: str) -> tuple[History, ...]:
    """The histories of all roles (`role`) or all layers (`layer`) of a run, layers in order."""
    found = [History(run, scope) for scope in run.telemetry.scopes() if scope.startswith(f"{kind}:")]
    return tuple(sorted(found, key=lambda one: (int(one.name) if one.name.isdigit() else -1, one.scope)))


def ratio(over: Array, under: Array) -> Array:
    """The quotients, not a number or infinite where the second is zero or next to it.

    Examples:
        >>> ratio(np.array([1.0, 1.0, 0.0]), np.array([2.0, 1e-320, 0.0])).tolist()
        [0.5, inf, nan]
    """
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return over / under


def _known(values: Array) -> Array:
    return values[np.isfinite(values)]
