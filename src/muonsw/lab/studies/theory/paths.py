"""Muon with noise, watched closely enough to check each lemma of its convergence proof on every path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from muonsw import decay_factor
from muonsw.lab.studies.experiment import Context
from muonsw.lab.studies.theory.chains import Rules, chain, gaussian, gradient, march, muon, nuclear_norm
from muonsw.theory import alignment_bound

Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Objective:
    """A convex function of `D = W - A` with smoothness 1 and its minimum, zero, at `D = 0`.

    Attributes:
        loss: Its value for each matrix of a stack.
        slope: Its gradient.
    """

    loss: Loss
    slope: Loss


QUADRATIC = Objective(loss=lambda D: 0.5 * D.square().sum((-2, -1)), slope=lambda D: D)
PSEUDO_HUBER = Objective(
    loss=lambda D: ((1.0 + D.square()).sqrt() - 1.0).sum((-2, -1)),
    slope=lambda D: D / (1.0 + D.square()).sqrt(),
)


@dataclass(frozen=True)
class Stack:
    """Chains that share a rule, a momentum and a target.

    Attributes:
        rule: `"constant"` or `"scaled"`.
        beta: Momentum.
        A: The minimizer, (m, n).
        starts: Shape (chains, m, n).
        noise: Standard deviation of each entry of a gradient's noise, one for each chain; none if absent.
        objective: What is minimized.
    """

    rule: str
    beta: float
    A: Tensor
    starts: Tensor
    noise: Tensor | None = None
    objective: Objective = QUADRATIC


@dataclass(frozen=True)
class Path:
    """What was seen of a stack; the first axis counts steps, the second chains.

    Attributes:
        losses: `f(W_t)`, one more than there are steps.
        nuclear: `|grad f(W_t)|_*`.
        errors: `|E_t|_F`, the normalized momentum minus the gradient.
        margins: What `<grad f(W_t), O_t>` has above the bound of the alignment lemma.
        norms: `|W_t|_F`, one more than there are steps.
    """

    losses: Tensor
    nuclear: Tensor
    errors: Tensor
    margins: Tensor
    norms: Tensor


def descend(
    stacks: Mapping[str, Stack], etas: Sequence[float], lam: float, rules: Rules, context: Context
) -> dict[str, Path]:
    """Run all stacks as one program and watch every step."""
    weights = {name: chain(stack.starts) for name, stack in stacks.items()}
    groups = [
        {"params": [weights[name]], "decay": rules[stack.rule], "momentum": stack.beta}
        for name, stack in stacks.items()
    ]
    optimizer = muon(groups, peak=max(etas), lam=lam)
    watchers = {name: _Watcher(stack, weights[name]) for name, stack in stacks.items()}
    for t in march(optimizer, etas, context.progress):
        for watcher in watchers.values():
            watcher.before(context.generator)
        optimizer.step()
        for watcher in watchers.values():
            phi = float(decay_factor(rules[watcher.stack.rule], lam, etas[t], max(etas)))
            watcher.after(optimizer.state[watcher.weight]["momentum_buffer"], etas[t], phi)
    return {name: watcher.report() for name, watcher in watchers.items()}


class _Watcher:
    """Writes the gradients of one stack and records its path."""

    def __init__(self, stack: Stack, weight: torch.nn.Parameter) -> None:
        self.stack, self.weight = stack, weight
        self.seen: dict[str, list[Tensor]] = {key: [] for key in ("losses", "nuclear", "errors", "margins", "norms")}

    def before(self, generator: torch.Generator) -> None:
        self._look()
        self.old, D = self.weight.detach().clone(), self.weight.detach() - self.stack.A
        self.slope = self.stack.objective.slope(D)
        noisy = gradient(self.weight).copy_(self.slope)
        if self.stack.noise is not None:
            noisy.add_(gaussian(noisy.shape, generator) * self.stack.noise[:, None, None])

    def after(self, momentum: Tensor, eta: float, phi: float) -> None:
        """Compare the step that was taken, read off the weights, with the gradient it should follow."""
        direction = ((1.0 - phi) * self.old - self.weight.detach()) / eta
        nuclear = nuclear_norm(self.slope)
        error = ((1.0 - self.stack.beta) * momentum - self.slope).square().sum((-2, -1)).sqrt()
        aligned = (self.slope * direction).sum((-2, -1))
        r = min(self.stack.A.shape)
        self.seen["nuclear"].append(nuclear)
        self.seen["errors"].append(error)
        self.seen["margins"].append(aligned - alignment_bound(nuclear, error, r=r))

    def _look(self) -> None:
        W = self.weight.detach()
        self.seen["losses"].append(self.stack.objective.loss(W - self.stack.A))
        self.seen["norms"].append(W.square().sum((-2, -1)).sqrt())

    def report(self) -> Path:
        self._look()
        return Path(**{key: torch.stack(values) for key, values in self.seen.items()})


def weighted_mean(values: Tensor, etas: Sequence[float], *, start: int = 0) -> Tensor:
    """The eta-weighted mean over the steps from `start` on, for each chain."""
    weights = values.new_tensor(etas[start:]).unsqueeze(1)
    mean: Tensor = (weights * values[start:]).sum(0) / weights.sum()
    return mean
