"""Norm rules: how a step controls the norm of a weight, with or without decay.

With R the target norm of a weight, phi the decay factor, eta the learning rate, and U the update before eta, including
the shape scale:

| rule        | W <-                                                | source                                      |
|-------------|-----------------------------------------------------|---------------------------------------------|
| `free`      | W - phi W - eta U                                   | plain decay                                 |
| `target`    | W - phi (W - R W/||W||) - eta U                     | Loshchilov's weight norm control (AdamWN)   |
| `hyperball` | R V/||V||, V = W - eta R U/||U||                    | Hyperball: a fixed norm, no decay           |

Under each rule W becomes `a W - b U`, with two scalars per weight that follow from ||W||, ||U||, <W, U> and R. The
optimizer takes its ordinary step; hooks around it compare the weights with a copy, recover U, and set the weights
again. So weights must be float32 or float64, and the copy doubles their memory during a step.

Under Muon there is one norm per orthogonalized matrix (an expert of a stack, a part of a fused projection); under other
algorithms one per expert of a stack, otherwise one per tensor. R is given by `target_norm`, the root mean square
of the elements; the default is the weight's norm at the first step, stored in its state as `radius`.

Groups with `weight_decay=0`, such as embeddings, gains and biases, are not affected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from muonsw.algorithms import ALGORITHMS
from muonsw.decay import decays, phi_of
from muonsw.distributed.shards import is_dtensor, local, offset, refuse_interleaved
from muonsw.matrices import STACK, WHOLE, MatrixCell, MatrixView, Region, box
from muonsw.nonfinite import Flag
from muonsw.precision import LOW_PRECISION
from muonsw.registry import Registry
from muonsw.state import RADIUS
from muonsw.work import Group, named_params

if TYPE_CHECKING:
    from muonsw.optimizer import ScaledDecayOptimizer

FREE = "free"

Number = float | Tensor


class Norms(NamedTuple):
    """||W||, ||U||, <W, U> and the target norm R of each weight, in float64."""

    W: Tensor
    U: Tensor
    WU: Tensor
    R: Tensor


class NormRule(NamedTuple):
    """A function of the norms, eta and phi that returns a and b of `W <- a W - b U`."""

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
    return a / torch.where(b > 0, b, 1.0)  # where b is zero, this only multiplies zeros


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
                raise ValueError(f"{rule} cannot be combined with block_period=: blocks have no norm")
            for name, param in named_params(group, number):
                if param.dtype in LOW_PRECISION:
                    raise ValueError(f"{rule} needs float32 weights, but {name} is {param.dtype}; keep float32 masters")
            if not NORM_RULES[group["norm"]].decays:
                group["decay"] = "none"
        elif group.get("target_norm") is not None and group.get("norm", FREE) == FREE:
            raise ValueError(f"target_norm={group['target_norm']:g} needs norm='target' or norm='hyperball'")
    if any(map(acts, optimizer.param_groups)) and "norm rules" not in optimizer._addons:
        optimizer._addons.add("norm rules")
        hooks = _NormHooks(optimizer)
        optimizer.register_step_pre_hook(lambda *_: hooks.before())
        optimizer.register_step_post_hook(lambda *_: hooks.after())


class Matrices(NamedTuple):
    """The matrices of a parameter, each with one norm; equal on every rank."""

    cells: list[MatrixCell]  # one cell of 0 rows if the whole parameter has one norm
    stack: torch.Size  # the leading axes, which count the matrices of each cell

    @classmethod
    def of(cls, group: Group, shape: torch.Size, view: MatrixView | None, matrix: str | None = None) -> Matrices:
        """The matrices that the algorithm sees; else the experts of a stack, or the parameter as a whole."""
        if view is None:
            view = MatrixView(group.get("matrix") or matrix or (STACK if group.get("role") == "experts" else None))
            if len(shape) < 2 or (len(shape) > 2 and view.matrix is None):
                return cls([MatrixCell(WHOLE, 0, 0)], shape[:0])
        return cls(list(view.cells(shape)), shape[: view.stack_axes(len(shape))])

    @property
    def shape(self) -> torch.Size:
        """The shape of a tensor with one number per matrix."""
        return torch.Size((len(self.cells), *self.stack))

    def here(self, param: Tensor) -> Iterator[tuple[Region, tuple[Any, ...]]]:
        """This rank's part of each cell, and the index of its numbers."""
        shard = box(offset(param), local(param).shape)
        for number, cell in enumerate(self.cells):
            stack = (slice(start, start + length) for _, start, length in shard.cuts[: len(self.stack)])
            yield cell.region.within(shard), (number, *stack)


def sum_over_ranks(optimizer: ScaledDecayOptimizer, params: Sequence[Tensor], sums: Sequence[Tensor]) -> list[Tensor]:
    """Sum over ranks, with one reduction for all parameters that the same ranks share."""
    totals, by_ranks = list(sums), dict[Any, list[int]]()
    for place, param in enumerate(params):
        ranks = optimizer._ranks.layouts.sharding_groups(param)
        by_ranks.setdefault((ranks, local(param).device), []).append(place)
    for (ranks, device), places in by_ranks.items():
        if ranks:
            message = torch.cat([sums[place].flatten() for place in places]).to(device)
            for process_group in ranks:
                dist.all_reduce(message, group=process_group)
            pieces = message.to(sums[places[0]].device).split_with_sizes([sums[place].numel() for place in places])
            for place, total in zip(places, pieces, strict=True):
                totals[place] = total.view_as(sums[place])
    return totals


class _NormHooks:
    """Copies weights before a step, and applies their norm rules after it."""

    def __init__(self, optimizer: ScaledDecayOptimizer) -> None:
        self._optimizer = optimizer
        self._before: dict[Tensor, Tensor] = {}

    def before(self) -> None:
        """Copy the weights that the step may move, and store missing radii."""
        self._before = {}
        state, without_radius = self._optimizer.state, []
        for number, group in enumerate(self._optimizer.param_groups):
            for name, param in named_params(group, number) if acts(group) else ():
                refuse_interleaved(name, param)
                if group.get("target_norm") is None and RADIUS not in state.get(param, {}):
                    without_radius.append((name, group, param))
                if param.grad is not None or is_dtensor(param):
                    self._before[param] = local(param).detach().clone()
        sums = [_dots(group, param, [(local(param), local(param))]) for _, group, param in without_radius]
        totals = sum_over_ranks(self._optimizer, [param for *_, param in without_radius], sums)
        norms = [total[0].sqrt() for total in totals]
        for (name, group, param), norm in zip(without_radius, norms, strict=True):
            if param.numel() and not bool((norm > 0).all()):
                raise ValueError(
                    f"{name} holds a weight of norm zero, which norm={group['norm']!r} would never change; pass "
                    f"target_norm=, or put it into a group with norm='free'"
                )
        for (_, _, param), norm in zip(without_radius, norms, strict=True):  # after all checks
            state[param][RADIUS] = norm.to(torch.promote_types(param.dtype, torch.float32))

    def after(self) -> None:
        """Apply the norm rules to the weights that the step has moved."""
        finite, before = self._optimizer._last_finite, self._before
        self._before = {}
        if finite is False:
            return
        moved, sums = [], []
        for number, params, eta in self._optimizer._last:
            group = self._optimizer.param_groups[number]
            if acts(group) and eta > 0:
                phi = phi_of(group, eta, group["step_count"])
                moved += [(group, param, eta, phi) for param in params]
        for group, param, eta, phi in moved:
            W = before[param]
            U = ((1 - phi) * W - local(param)) / eta
            sums.append(_dots(group, param, [(W, W), (U, U), (W, U)]))
        totals = sum_over_ranks(self._optimizer, [param for _, param, _, _ in moved], sums)
        for (group, param, eta, phi), (WW, UU, WU) in zip(moved, totals, strict=True):
            matrices, weight, old = _matrices(group, param), local(param).detach(), before[param]
            if group.get("target_norm") is None:
                R = self._optimizer.state[param][RADIUS].double()
            else:
                areas = [math.prod(cell.region.shape_in(param.shape)[len(matrices.stack) :]) for cell in matrices.cells]
                column = WW.new_tensor(areas).sqrt().view(-1, *[1] * len(matrices.stack))
                R = float(group["target_norm"]) * column.expand_as(WW)
            a, b = NORM_RULES[group["norm"]].coefficients(Norms(WW.sqrt(), UU.sqrt(), WU, R), eta, phi)
            a, b = (torch.as_tensor(x, dtype=R.dtype, device=R.device).expand_as(R).to(old.dtype) for x in (a, b))
            for part, index in matrices.here(param):
                W, here = part.of(old), part.of(weight)
                keep, move = (x[index].view(*x[index].shape, *[1] * (W.dim() - len(matrices.stack))) for x in (a, b))
                U = ((1 - phi) * W - here) / eta  # recomputed: storing every U would take as much memory as the weights
                moved_to = keep * W - move * U
                here.copy_(torch.where(finite.ok, moved_to, here) if isinstance(finite, Flag) else moved_to)


def _matrices(group: Group, param: Tensor) -> Matrices:
    return Matrices.of(group, param.shape, ALGORITHMS[group["algorithm"]].view(group))


def _dots(group: Group, param: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Inner products of shards, per matrix, in float64."""
    matrices = _matrices(group, param)
    totals = torch.zeros(len(pairs), *matrices.shape, dtype=torch.float64, device=local(param).device)
    for total, pair in zip(totals, pairs, strict=True):
        for part, index in matrices.here(param):
            x, y = (part.of(tensor.detach()).flatten(len(matrices.stack)).double() for tensor in pair)
            total[index] = torch.linalg.vecdot(x, y)
    return totals
