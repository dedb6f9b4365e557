"""Muon on the matrix quadratic `1/2 |W - A|_F^2` under both rules, watched at every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw.lab.studies.experiment import Context
from muonsw.lab.studies.theory.chains import (
    CONSTANT,
    SCALED,
    Rules,
    chain,
    gaussian,
    gradient,
    log_spaced,
    march,
    muon,
    spectral_norm,
)
from muonsw.theory import muon_norm_bounds

# `exact` agrees with the SVD to 2e-10, so a polar factor may be that much longer than 1.
POLAR_ERROR = 1e-9


@dataclass(frozen=True)
class Watched:
    """What was seen of one stack of chains.

    Attributes:
        end: The last weights, (chains, m, n).
        losses: After each step, and before the first, (steps + 1, chains).
        radius_excess: The largest `|W_t|_op / bound_t - 1` over all steps, against `muon_norm_bounds`.
        spectral: `|W|_op` at the end.
        separation: The smallest `|W_t - A|_op` over about 50 log-spaced steps.
    """

    end: Tensor
    losses: Tensor
    radius_excess: float
    spectral: Tensor
    separation: float


def target(rows: int, columns: int, sigma_max: float, generator: torch.Generator) -> Tensor:
    """A Gaussian matrix, whose spectrum is close to Marchenko-Pastur, scaled to a largest singular value."""
    A = gaussian((rows, columns), generator)
    return A * (sigma_max / spectral_norm(A))


def descend(
    stacks: Mapping[str, tuple[str, float, Tensor, Tensor]],
    etas: Sequence[float],
    lam: float,
    rules: Rules,
    context: Context,
) -> dict[str, Watched]:
    """Run stacks of chains together, each named and given as (rule, beta, target, starts)."""
    weights = {name: chain(starts) for name, (_, _, _, starts) in stacks.items()}
    groups = [
        {"params": [weights[name]], "decay": rules[rule], "momentum": beta}
        for name, (rule, beta, _, _) in stacks.items()
    ]
    optimizer = muon(groups, peak=max(etas), lam=lam)
    watchers = {
        name: _Watcher(weights[name], A, etas, lam, watch_norm=rule == CONSTANT)
        for name, (rule, _, A, _) in stacks.items()
    }
    for t in march(optimizer, etas, context.progress):
        for name, (_, _, A, _) in stacks.items():
            torch.sub(weights[name], A, out=gradient(weights[name]))
        optimizer.step()
        for watcher in watchers.values():
            watcher.look(t + 1)
    return {name: watcher.report() for name, watcher in watchers.items()}


class _Watcher:
    """Follows one stack of chains."""

    def __init__(
        self, weight: torch.nn.Parameter, A: Tensor, etas: Sequence[float], lam: float, *, watch_norm: bool
    ) -> None:
        self.weight, self.A, self.watch_norm = weight, A, watch_norm
        largest = float(spectral_norm(weight.detach()).max())
        self.bounds = muon_norm_bounds(largest, etas, lam=lam)
        self.looks = set(log_spaced(len(etas), 50))
        self.losses = [self._loss()]
        self.excess, self.separation = -1.0, torch.inf

    def _loss(self) -> Tensor:
        return 0.5 * (self.weight.detach() - self.A).square().sum((-2, -1))

    def look(self, t: int) -> None:
        self.losses.append(self._loss())
        if self.watch_norm:
            largest = float(spectral_norm(self.weight.detach()).max())
            self.excess = max(self.excess, largest / self.bounds[t] - 1.0)
        if t in self.looks:
            distance = float(spectral_norm(self.weight.detach() - self.A).min())
            self.separation = min(self.separation, distance)

    def report(self) -> Watched:
        end = self.weight.detach()
        return Watched(end, torch.stack(self.losses), self.excess, spectral_norm(end), self.separation)


def floor_excess(singular_values: Tensor, etas: Sequence[float], lam: float) -> float:
    """How far above its floor the loss of constant decay still is after a run from near zero.

    A direction of A outside the radius R is pushed outward at every step, so it stands at `R (1 - prod(1 -
    eta lambda))`; those inside the radius have arrived.
    """
    left = 1.0
    for eta in etas:
        left *= 1.0 - eta * lam
    missing = left / lam
    outside = (singular_values - 1.0 / lam).clamp(min=0.0)
    return float((outside * missing + (outside > 0) * missing**2 / 2.0).sum())


def jitter_loss(r: int, eta: float, beta: float) -> float:
    """The loss of hovering around the target in all r directions: `r/2 (2 eta/(1 - beta))^2`.

    A step has length eta in each direction whatever the gradient, and an overshoot lasts for the memory of
    the momentum, `1/(1 - beta)` steps. An estimate with a factor of two to spare, not a theorem.
    """
    return r / 2.0 * (2.0 * eta / (1.0 - beta)) ** 2


def both_rules(prefix: str, beta: float, A: Tensor, starts: Tensor) -> dict[str, tuple[str, float, Tensor, Tensor]]:
    """The same starts under constant and under scaled decay."""
    return {f"{prefix}{rule}": (rule, beta, A, starts) for rule in (CONSTANT, SCALED)}
