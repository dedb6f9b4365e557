"""Norm rules: what a step does about the norm of a weight, besides or instead of shrinking it towards zero.

With R the norm that a weight should have, phi the decay rule's fraction, eta the learning rate, and U the update before
it, shape scale included:

| rule        | W <-                                                | who means it                                |
|-------------|-----------------------------------------------------|---------------------------------------------|
| `free`      | W - phi W - eta U                                   | decay, whatever the norm becomes            |
| `target`    | W - phi (W - R W/||W||) - eta U                     | Loshchilov's weight norm control (AdamWN)   |
| `hyperball` | R V/||V||, V = W - eta R U/||U||                    | Hyperball: the norm stays, nothing decays   |

Whatever the rule, W becomes `a W - b U` with two scalars for each weight, which follow from ||W||, ||U||, <W, U> and R.
The optimizer takes its ordinary step; hooks around it compare the weights with a copy, recover U, and set the weights
again. So weights must be float32 or float64, and the copy takes their memory once more during a step.

A norm is that of one weight: of each matrix that Muon orthogonalizes (an expert of a stack, a part of a fused
projection), and under other algorithms of each expert of a stack or the whole tensor. R is `target_norm`, as the root
mean square of the elements, or else the norm that the weight has at the first step, kept in its state as `radius`.

Groups with `weight_decay=0` are left alone: norms of embeddings, gains and biases are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw import rates
from muonsw.algorithms import ALGORITHMS
from muonsw.decay import decays
from muonsw.distributed.shards import is_dtensor, local, offset, refuse_interleaved
from muonsw.matrices import FLATTEN, STACK, WHOLE, Region, box
from muonsw.nonfinite import Flag
from muonsw.precision import LOW_PRECISION
from muonsw.registry import Registry
from muonsw.work import Group, names_of

if TYPE_CHECKING:
    from muonsw.optimizer import ScaledDecayOptimizer

FREE = "free"

Number = float | Tensor


class Norms(NamedTuple):
    """What a rule knows of each weight: ||W||, ||U||, <W, U>, and the norm R that it should have, in float64."""

    W: Tensor
    U: Tensor
    WU: Tensor
    R: Tensor


class NormRule(NamedTuple):
    """Where a step leads a weight: a and b of `W <- a W - b U`, from the norms, eta and phi."""

    coefficients: Callable[[Norms, float, float], tuple[Number, Number]]
    decays: bool = True  # whether phi is used


def target(norms: Norms, eta: float, phi: float) -> tuple[Number, Number]:
    """W - phi (W - R W/||W||) - eta U."""
    return 1 - phi * (1 - _quotient(norms.R, norms.W)), eta


def hyperball(norms: Norms, eta: float, phi: float) -> tuple[Number, Number]:  # noqa: ARG001
    """R V/||V||, V = W - eta R U/||U||."""
    move = eta * _quotient(norms.R, norms.U)
    square = norms.W**2 - 2 * move * norms.WU + (move * norms.U) ** 2
    keep = _quotient(norms.R, square.clamp(min=0).sqrt())
    return keep, keep * move


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    return a / torch.where(b > 0, b, 1.0)  # where b is zero, so is what the quotient multiplies


NORM_RULES: Registry[NormRule] = Registry("norm rule")
NORM_RULES.register(FREE, NormRule(lambda norms, eta, phi: (1 - phi, eta)))  # noqa: ARG005
NORM_RULES.register("target", NormRule(target))
NORM_RULES.register("hyperball", NormRule(hyperball, decays=False))


def acts(group: Group) -> bool:
    return group.get("norm", FREE) != FREE and decays(group)


def attach(optimizer: ScaledDecayOptimizer) -> None:
    for number, group in enumerate(optimizer.param_groups):
        if acts(group):
            rule = f"norm={group['norm']!r} of param group {number}"
            if group["cautious"]:
                raise ValueError(f"{rule} acts on whole weights; cautious=True is for norm='free'")
            if group.get("block_period") is not None:
                raise ValueError(f"{rule} and block_period= do not go together: a block has no norm of its own")
            for name, param in zip(names_of(group, number), group["params"], strict=True):
                if param.dtype in LOW_PRECISION:
                    raise ValueError(f"{rule} needs float32 weights, but {name} is {param.dtype}; keep float32 masters")
            if not NORM_RULES[group["norm"]].decays:
                group["decay"] = "none"
    if any(map(acts, optimizer.param_groups)) and "norm rules" not in optimizer._addons:
        optimizer._addons.add("norm rules")
        hooks = _NormHooks(optimizer)
        optimizer.register_step_pre_hook(lambda *_: hooks.before())
        optimizer.register_step_post_hook(lambda *_: hooks.after())


class _Weights(NamedTuple):
    """The weights of one parameter: regions of it, and how many of its first axes count weights in each region."""

    param: Tensor
    regions: list[Region]
    stack_axes: int

    @classmethod
    def of(cls, group: Group, param: Tensor) -> _Weights:
        view = ALGORITHMS[group["algorithm"]].view(group)
        if view is not None:
            return cls(param, [cell.region for cell in view.cells(param.shape)], view.stack_axes(param.dim()))
        matrix = group.get("matrix")
        stacked = param.dim() > 2 and matrix != FLATTEN and (matrix == STACK or group["role"] == "experts")
        return cls(param, [WHOLE], param.dim() - 2 if stacked else 0)

    @property
    def shape(self) -> torch.Size:
        """The shape of one number for each weight: (regions, *stack)."""
        return torch.Size((len(self.regions), *self.param.shape[: self.stack_axes]))

    @property
    def elements(self) -> Tensor:
        counts = [math.prod(region.shape_in(self.param.shape)[self.stack_axes :]) for region in self.regions]
        column = torch.tensor(counts, dtype=torch.float64, device=local(self.param).device)
        return column.view(-1, *[1] * self.stack_axes).expand(self.shape)

    def here(self) -> Iterator[tuple[Region, tuple[Any, ...]]]:
        """What this rank holds: for each region the part of its shard, and the index of its numbers."""
        shard = box(offset(self.param), local(self.param).shape)
        for number, region in enumerate(self.regions):
            part = region.within(shard)
            stack = part.shape_in(local(self.param).shape)[: self.stack_axes]
            starts = offset(self.param)[: self.stack_axes]
            slices = (slice(start, start + length) for start, length in zip(starts, stack, strict=True))
            yield part, (number, *slices)

    def sums(self, X: Tensor, Y: Tensor) -> Tensor:
        """This rank's part of <X, Y> for each weight, of local tensors."""
        totals = torch.zeros(self.shape, dtype=torch.float64, device=X.device)
        for part, index in self.here():
            x, y = (part.of(tensor).flatten(self.stack_axes) for tensor in (X, Y))
            totals[index] = torch.linalg.vecdot(x.double(), y.double())
        return totals

    def spread(self, numbers: Tensor, index: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
        """The numbers of weights in a part, so that they broadcast with it."""
        chosen = numbers[index].to(dtype)
        return chosen.view(*chosen.shape, *[1] * (self.param.dim() - self.stack_axes))


class _NormHooks:
    """Copies ruled weights before a step, and sets them again after it."""

    def __init__(self, optimizer: ScaledDecayOptimizer) -> None:
        self._optimizer = optimizer
        self._before: dict[Tensor, Tensor] = {}

    def before(self) -> None:
        # Keep the norm of every weight that has no radius yet.
        state, lacking = self._optimizer.state, []
        for number, group in enumerate(self._optimizer.param_groups):
            if not acts(group) or group.get("target_norm") is not None:
                continue
            for name, param in zip(names_of(group, number), group["params"], strict=True):
                if is_dtensor(param):
                    refuse_interleaved(name, param)
                if "radius" not in state.get(param, {}):
                    lacking.append((name, group, _Weights.of(group, param)))
        all_weights = [weights for _, _, weights in lacking]
        shards = [local(weights.param).detach() for weights in all_weights]
        sums = [weights.sums(W, W) for weights, W in zip(all_weights, shards, strict=True)]
        norms = [total.sqrt() for total in self._reduced(all_weights, sums)]
        for (name, group, weights), norm in zip(lacking, norms, strict=True):
            if weights.param.numel() and not bool((norm > 0).all()):
                raise ValueError(
                    f"{name} holds a weight of norm zero, which norm={group['norm']!r} would keep there; give "
                    f"target_norm=, or a group with norm='free' for it"
                )
        for weights, norm in zip(all_weights, norms, strict=True):
            state[weights.param]["radius"] = norm.to(torch.promote_types(weights.param.dtype, torch.float32))
        self._before = {
            param: local(param).detach().clone()
            for group in self._optimizer.param_groups
            for param in (group["params"] if acts(group) else ())
            if param.grad is not None or is_dtensor(param)
        }

    def after(self) -> None:
        """Set the weights that the step has moved to where their rules lead them."""
        skipped = self._optimizer._last_skipped
        if skipped is True:
            return
        moved = [
            (self._optimizer.param_groups[number], _Weights.of(self._optimizer.param_groups[number], param), eta)
            for number, params, eta in self._optimizer._last
            for param in params
            if acts(self._optimizer.param_groups[number]) and eta > 0
        ]

        def update(group: Group, param: Tensor, eta: float) -> Tensor:
            """U of `W <- (1 - phi) W - eta U`, the step that the optimizer has taken."""
            phi = rates.phi_of(group, eta, group["step_count"])
            return ((1 - phi) * self._before[param] - local(param)) / eta

        sums = []
        for group, weights, eta in moved:
            W, U = self._before[weights.param], update(group, weights.param, eta)
            sums.append(torch.stack([weights.sums(W, W), weights.sums(U, U), weights.sums(W, U)]))
        totals = self._reduced([weights for _, weights, _ in moved], sums)
        for (group, weights, eta), (WW, UU, WU) in zip(moved, totals, strict=True):
            param, phi = weights.param, rates.phi_of(group, eta, group["step_count"])
            if group.get("target_norm") is not None:
                R = weights.elements.sqrt() * float(group["target_norm"])
            else:
                R = self._optimizer.state[param]["radius"].double()
            a, b = NORM_RULES[group["norm"]].coefficients(Norms(WW.sqrt(), UU.sqrt(), WU, R), eta, phi)
            a, b = (number * torch.ones_like(R) for number in (a, b))
            U = update(group, param, eta)  # again, since all of them would take the memory of the weights
            for part, index in weights.here():
                W, weight = part.of(self._before[param]), part.of(local(param).detach())
                moved_to = weights.spread(a, index, W.dtype) * W - weights.spread(b, index, W.dtype) * part.of(U)
                weight.copy_(torch.where(skipped.ok, moved_to, weight) if isinstance(skipped, Flag) else moved_to)
        self._before = {}

    def _reduced(self, all_weights: Sequence[_Weights], sums: list[Tensor]) -> list[Tensor]:
        """Sums over all shards: one all-reduce for all parameters that the same ranks share."""
        layouts, totals = self._optimizer._ranks.layouts, list(sums)
        by_groups: dict[Any, list[int]] = {}
        for place, weights in enumerate(all_weights):
            by_groups.setdefault((layouts.sharding_groups(weights.param), sums[place].device), []).append(place)
        for (groups, _), places in by_groups.items():
            if not groups:
                continue
            message = torch.cat([sums[place].flatten() for place in places])
            for process_group in groups:
                dist.all_reduce(message, group=process_group)
            pieces = message.split_with_sizes([sums[place].numel() for place in places])
            for place, total in zip(places, pieces, strict=True):
                totals[place] = total.view_as(sums[place])
        return totals
