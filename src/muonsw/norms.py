"""Norm rules: what a step does about the norm of a weight, instead of shrinking it towards zero.

With n(X) = X/||X|| (and n(0) = 0), R the norm that a weight is to have, phi the decay rule's fraction and `move` the
learning rate times the shape scale:

| rule        | W <-                               | who means it                                     |
|-------------|------------------------------------|--------------------------------------------------|
| `free`      | W - phi W - move U                 | decay, whatever the norm becomes                 |
| `target`    | W - phi (W - R n(W)) - move U      | Loshchilov's weight norm control (AdamWN)        |
| `hyperball` | R n(W - eta R n(U))                | Hyperball: the norm stays, nothing decays        |

A norm is that of one weight: of each matrix that Muon orthogonalizes (an expert of a stack, a part of a fused
projection), and under other algorithms of each expert of a stack or the whole tensor. R is `target_norm`, as the root
mean square of the entries, or else the norm that the weight has at the first step, kept in its state as `radius`.

Groups with `weight_decay=0` are left alone: norms of embeddings, gains and biases are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import FusedUpdate, Update
from muonsw.decay import decays
from muonsw.matrices import FLATTEN, STACK, Part, views
from muonsw.registry import Registry
from muonsw.work import Group, Item

if TYPE_CHECKING:
    from muonsw.work import Batch

FREE = "free"


class Ball(NamedTuple):
    """The norm that weights are to have, R, and along which axes norms are taken."""

    R: Tensor
    axes: tuple[int, ...]

    def n(self, X: Tensor) -> Tensor:
        """X / ||X||, matrix by matrix; zero for zero."""
        norm = torch.linalg.vector_norm(X, dim=self.axes, keepdim=True)
        return X / torch.where(norm > 0, norm, 1.0)


class NormRule(NamedTuple):
    """Where a step leads a weight.

    Attributes:
        moved: the new weight from W, the update (learning rate and scale multiplied in), phi and the ball.
        update: what becomes of a direction before it is multiplied by the learning rate alone; None leaves it to the
            shape scale.
        decays: whether phi is used at all.
    """

    moved: Callable[[Tensor, Tensor, float | Tensor, Ball], Tensor]
    update: Callable[[Tensor, Ball], Tensor] | None = None
    decays: bool = True


def target(W: Tensor, update: Tensor, phi: float | Tensor, ball: Ball) -> Tensor:
    """W - phi (W - R n(W)) - update."""
    return W - phi * (W - ball.R * ball.n(W)) - update


def hyperball(W: Tensor, update: Tensor, phi: float | Tensor, ball: Ball) -> Tensor:  # noqa: ARG001
    """R n(W - update)."""
    return ball.R * ball.n(W - update)


def on_the_ball(U: Tensor, ball: Ball) -> Tensor:
    """R n(U): an update as long as the weight."""
    return ball.R * ball.n(U)


def free(W: Tensor, update: Tensor, phi: float | Tensor, ball: Ball) -> Tensor:  # noqa: ARG001
    """W - phi W - update; `muonsw.apply` does the same with fewer passes."""
    return W - phi * W - update


NORM_RULES: Registry[NormRule] = Registry("norm rule")
NORM_RULES.register(FREE, NormRule(free))
NORM_RULES.register("target", NormRule(target))
NORM_RULES.register("hyperball", NormRule(hyperball, update=on_the_ball, decays=False))


def acting(group: Group) -> NormRule | None:
    """The rule that acts on a group's weights, None where their norm is free."""
    return NORM_RULES[group["norm"]] if group["norm"] != FREE and decays(group) else None


def uses_decay(group: Group) -> bool:
    """Whether a group's weights shrink by its decay rule at all."""
    rule = acting(group)
    return decays(group) if rule is None else rule.decays


def refuse(group: Group, label: str) -> None:
    """Refuse options that a norm rule gives no meaning to."""
    if acting(group) is not None and group["cautious"]:
        raise ValueError(f"norm={group['norm']!r} of {label} acts on whole weights; cautious=True is for norm='free'")


def refuse_sharded(group: Group, items: Sequence[Item]) -> None:
    """Norms are taken of whole weights, which must be here."""
    if acting(group) is not None and items:
        raise ValueError(
            f"norm={group['norm']!r} needs whole weights on every rank, but {items[0].name} is sharded or shared "
            f"by a process_group; use a decay rule with norm='free', or DistributedDataParallel without "
            f"process_group"
        )


def prepared(group: Group, update: Update | FusedUpdate, rule: NormRule) -> Update | FusedUpdate:
    """The update as the rule wants it."""
    assert isinstance(update, Update), "an algorithm must leave its directions to the norm rule: see Budget.plain"
    if rule.update is None:
        return update
    weights = views(update.parts, [part.item.param for part in update.parts])
    directions = [
        rule.update(direction.to(wide_dtype(weight)), ball_of(group, part))
        for part, weight, direction in zip(update.parts, weights, update.directions, strict=True)
    ]
    return Update(update.parts, directions)


def ball_of(group: Group, part: Part) -> Ball:
    """The ball of one part, which holds whole weights."""
    param = part.item.param
    R = part.state("radius") if group["target_norm"] is None else _given(group, part.region.of(param))
    return Ball(R, norm_axes(group, param))


def norm_axes(group: Group, param: Tensor) -> tuple[int, ...]:
    """The axes within one weight; those of a stack of matrices are the last two."""
    matrix = group.get("matrix")
    stacked = param.dim() > 2 and matrix != FLATTEN and (matrix == STACK or group["role"] == "experts")
    return (-2, -1) if stacked else tuple(range(param.dim()))


def wide_dtype(weight: Tensor) -> torch.dtype:
    """The precision of norms."""
    return torch.float64 if weight.dtype == torch.float64 else torch.float32


def _given(group: Group, weight: Tensor) -> Tensor:
    entries = 1
    for axis in norm_axes(group, weight):
        entries *= weight.shape[axis]
    return torch.full((), group["target_norm"] * entries**0.5, dtype=wide_dtype(weight), device=weight.device)


@_disable_dynamo  # it asks for values, once
def initial_radius(group: Group, name: str, param: Tensor) -> Tensor:
    """The norm of each weight in a parameter, for each entry along the axes that tell weights apart.

    It has the axes of the parameter, of length one where all entries belong to the same weight, so that whatever cuts
    a part out of the parameter cuts its radius out of this.
    """
    axes, wide = norm_axes(group, param), param.detach().to(wide_dtype(param))
    view = ALGORITHMS[group["algorithm"]].view(group)
    sizes = None if view is None else view.sizes(param.shape)
    if view is None or sizes is None:
        radius: Tensor = torch.linalg.vector_norm(wide, dim=axes, keepdim=True)
    else:
        along = view.split_axis(param.shape)
        norms = [torch.linalg.vector_norm(p, dim=axes, keepdim=True) for p in wide.split_with_sizes(list(sizes), along)]
        radius = torch.cat(
            [norm.repeat_interleave(size, along) for norm, size in zip(norms, sizes, strict=True)], along
        )
    if param.numel() and not bool((radius > 0).all()):
        raise ValueError(
            f"{name} holds a weight of norm zero, which norm={group['norm']!r} would keep there; give target_norm=, or "
            f"a group with norm='free' for it"
        )
    return radius


Radii = list[tuple[dict[str, Tensor], Tensor]]


def missing_radii(work: Sequence[Batch]) -> Radii:
    """The radius of each weight that has none yet, with the state that is to keep it; one of zero is an error.

    For all groups before any weight moves: a weight that a later group refuses must not find an earlier one moved.
    """
    return [
        (item.state, initial_radius(batch.group, item.name, item.param))
        for batch in work
        if state_keys(batch.group)
        for item in batch.items
        if "radius" not in item.state
    ]


def keep(radii: Radii) -> None:
    """Keep the radii of a step that is taken."""
    for state, radius in radii:
        state["radius"] = radius


def state_keys(group: Group) -> tuple[str, ...]:
    """What a parameter's state must remember for the rule."""
    return ("radius",) if acting(group) is not None and group["target_norm"] is None else ()
