"""Norm rules: what a step does about the norm of a weight, beside or instead of shrinking it towards zero.

With R the norm that a weight is to have, phi the decay rule's fraction, eta the learning rate, and U the update before
it, shape scale included:

| rule        | W <-                                                | who means it                                |
|-------------|-----------------------------------------------------|---------------------------------------------|
| `free`      | W - phi W - eta U                                   | decay, whatever the norm becomes            |
| `target`    | W - phi (W - R W/||W||) - eta U                     | Loshchilov's weight norm control (AdamWN)   |
| `hyperball` | R V/||V||, V = W - eta R U/||U||                    | Hyperball: the norm stays, nothing decays   |

Whatever the rule, W becomes `a W - b U` with two scalars for each weight, which follow from ||W||, ||U||, <W, U> and R.
So over shards a rule needs the sums of three products over all ranks, and no whole weight.

A norm is that of one weight: of each matrix that Muon orthogonalizes (an expert of a stack, a part of a fused
projection), and under other algorithms of each expert of a stack or the whole tensor. R is `target_norm`, as the root
mean square of the entries, or else the norm that the weight has at the first step, kept in its state as `radius`.

Groups with `weight_decay=0` are left alone: norms of embeddings, gains and biases are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import FusedUpdate, Rates, Update
from muonsw.decay import decays
from muonsw.distributed.layout import SHARDS, Layouts
from muonsw.distributed.shards import as_dtensor, beside, offset
from muonsw.distributed.sums import ShardedWeights, Term, all_reduce_sums, shard_numbers
from muonsw.matrices import FLATTEN, STACK, Part, Region, box, views
from muonsw.registry import Registry
from muonsw.slots import wide_dtype
from muonsw.work import Batch, Group, Item, MissingState

FREE = "free"

Number = float | Tensor


class Norms(NamedTuple):
    """What a rule knows of each weight in a part: float64 scalars along axes that broadcast with it.

    Attributes:
        W: ||W||.
        U: ||U||, of the direction alone.
        WU: <W, U>.
        scale: the shape scale, which multiplies the direction unless the rule says otherwise.
        R: the norm that the weight is to have; zero for rules without.
    """

    W: Tensor
    U: Tensor
    WU: Tensor
    scale: float
    R: Tensor

    def combined(self, a: Number, b: Number) -> Tensor:
        """||a W - b U||."""
        square = (a * self.W) ** 2 - 2 * a * b * self.WU + (b * self.U) ** 2
        return square.clamp(min=0).sqrt()


class NormRule(NamedTuple):
    """Where a step leads a weight.

    Attributes:
        coefficients: a and b of `W <- a W - b U`, from the norms, `eta * length`, phi and the group.
        length: what multiplies a direction before the learning rate, instead of the shape scale.
        decays: whether phi is used at all.
        uses_radius: whether R is.
    """

    coefficients: Callable[[Norms, Number, Number, Group], tuple[Number, Number]]
    length: Callable[[Norms, Number, Group], Tensor] | None = None
    decays: bool = True
    uses_radius: bool = False


def free(norms: Norms, move: Number, phi: Number, group: Group) -> tuple[Number, Number]:  # noqa: ARG001
    """W - phi W - move U; `muonsw.apply` does the same with fewer passes."""
    return 1 - phi, move


def target(norms: Norms, move: Number, phi: Number, group: Group) -> tuple[Number, Number]:  # noqa: ARG001
    """W - phi (W - R W/||W||) - move U."""
    return 1 - phi * (1 - quotient(norms.R, norms.W)), move


def hyperball(norms: Norms, move: Number, phi: Number, group: Group) -> tuple[Number, Number]:  # noqa: ARG001
    """R V/||V||, V = W - move U."""
    keep = quotient(norms.R, norms.combined(1.0, move))
    return keep, keep * move


def radius_length(norms: Norms, phi: Number, group: Group) -> Tensor:  # noqa: ARG001
    """R/||U||: an update as long as the weight."""
    return quotient(norms.R, norms.U)


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """The quotient of two norms; where the second is zero, so is what the quotient multiplies, and it is the first."""
    return a / torch.where(b > 0, b, 1.0)


NORM_RULES: Registry[NormRule] = Registry("norm rule")
NORM_RULES.register(FREE, NormRule(free))
NORM_RULES.register("target", NormRule(target, uses_radius=True))
NORM_RULES.register("hyperball", NormRule(hyperball, radius_length, decays=False, uses_radius=True))


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


# norms of weights, and of shards of them


def norm_axes(group: Group, param: Tensor) -> tuple[int, ...]:
    """The axes within one weight; those of a stack of matrices are the last two."""
    matrix = group.get("matrix")
    stacked = param.dim() > 2 and matrix != FLATTEN and (matrix == STACK or group["role"] == "experts")
    return (-2, -1) if stacked else tuple(range(-param.dim(), 0))


def measured(group: Group, update: Update) -> list[Tensor]:
    """||W||^2, ||U||^2, <W, U> and the number of elements, (*axes, 4), of each part: a weight or a shard of one."""
    weights = views(update.parts, [part.item.param for part in update.parts])
    columns = zip(update.parts, weights, update.directions, strict=True)
    return [_products(group, part, weight, direction) for part, weight, direction in columns]


def _products(group: Group, part: Part, weight: Tensor, direction: Tensor) -> Tensor:
    axes = norm_axes(group, part.item.param)
    W, U = (X.to(wide_dtype(weight.dtype)) for X in (weight, direction))
    squares = [torch.linalg.vector_norm(X, dim=axes, keepdim=True).double().square() for X in (W, U)]
    inner = torch.linalg.vecdot(*(X.flatten(-len(axes)) for X in (W, U))).double().view_as(squares[0])
    elements = torch.full_like(inner, weight.numel() // max(1, inner.numel()))
    return torch.stack([*squares, inner, elements], -1)


def prepared(group: Group, update: Update | FusedUpdate, rates: Rates, sums: list[Tensor] | None = None) -> Update:
    """An update with the norms of its weights, and with the lengths that the rule gives its directions.

    `sums` is what `measured` found, added up over all shards; None where the parts hold whole weights.
    """
    assert isinstance(update, Update), "an algorithm must leave its directions to the norm rule: see Budget.plain"
    rule = rates.norm
    assert rule is not None
    found = []
    for part, products in zip(update.parts, measured(group, update) if sums is None else sums, strict=True):
        WW, UU, WU, elements = products.unbind(-1)
        found.append(Norms(WW.sqrt(), UU.sqrt(), WU, update.scale, _radius(group, rule, part, elements)))
    if rule.length is None:
        return update._replace(norms=found)
    phi = rates.applied(update.parts[0].item.param.dtype)[1]
    return Update(update.parts, update.directions, 1.0, found, [rule.length(one, phi, group) for one in found])


def _radius(group: Group, rule: NormRule, part: Part, elements: Tensor) -> Tensor:
    """R of the weights in a part."""
    if not rule.uses_radius:
        return torch.zeros_like(elements)
    if group["target_norm"] is not None:
        return elements.sqrt() * float(group["target_norm"])
    return _per_weight(group, part, part.item.state["radius"]).double()


def _per_weight(group: Group, part: Part, tensor: Tensor) -> Tensor:
    """What a tensor with one element for each weight (or for each place of a split axis) has for a part."""
    cut = part.region.of(tensor)
    for axis in norm_axes(group, part.item.param):
        cut = cut.narrow(axis, 0, 1)
    return cut


Waiting = tuple[Group, Update, Rates]


class ShardedNorms:
    """The sharded weights of a step's batches, whose norms are sums over ranks.

    Args:
        work: the batches, in which every rank has the same parameters in the same order.
        layouts: how parameters lie over ranks.
    """

    def __init__(self, work: Sequence[Batch], layouts: Layouts) -> None:
        ruled = [(batch.group, item) for batch in work if acting(batch.group) is not None for item in batch.items]
        pairs = [(item, _sharded(group, item, layouts)) for group, item in ruled if item.whole is not None]
        found = [(item, weights) for item, weights in pairs if weights is not None]
        self.weights = [weights for _, weights in found]
        self._places = {id(item.whole): place for place, (item, _) in enumerate(found)}

    def concern(self, update: Update) -> bool:
        """Whether an update has parts of weights that lie on several ranks."""
        return bool(self._places) and any(id(part.item.whole) in self._places for part in update.parts)

    def of(self, item: Item) -> ShardedWeights | None:
        """The weights of a parameter, None where this rank holds whole ones."""
        place = self._places.get(id(item.whole))
        return None if place is None else self.weights[place]

    def prepared(self, waiting: Sequence[Waiting]) -> list[Waiting]:
        """Updates with the norms of their weights, by one all-reduce for all of them; every rank must come here."""
        sums = [measured(group, update) for group, update, _ in waiting]
        terms, owners = [], []
        for number, (group, update, _) in enumerate(waiting):
            for index, part in enumerate(update.parts):
                place = self._places.get(id(part.item.whole))
                if place is not None:
                    numbers = _per_weight(group, part, self.weights[place].numbers)
                    terms.append(Term(place, numbers, sums[number][index]))
                    owners.append((number, index))
        for (number, index), total in zip(owners, all_reduce_sums(self.weights, terms, 4), strict=True):
            sums[number][index] = total
        return [
            (group, prepared(group, update, rates, own), rates)
            for (group, update, rates), own in zip(waiting, sums, strict=True)
        ]

    def norms(self, items: Sequence[Item]) -> list[Tensor]:
        """The norm of each weight of sharded parameters, laid out as `ShardedWeights.numbers`; a collective."""
        terms = []
        for item in items:
            numbers = self.weights[self._places[id(item.whole)]].numbers
            axes = [axis for axis, length in enumerate(numbers.shape) if length == 1]
            squares = item.param.detach().double().square()
            values = squares.sum(axes, keepdim=True) if axes else squares
            terms.append(Term(self._places[id(item.whole)], numbers, values))
        return [total[..., 0].sqrt() for total in all_reduce_sums(self.weights, terms, 1)]


def _sharded(group: Group, item: Item, layouts: Layouts) -> ShardedWeights | None:
    param, axes = item.parameter, norm_axes(group, item.parameter)
    layout = layouts.of(param, param.dim() - len(axes))
    if layout.kind != SHARDS:
        return None
    assert layout.grid is not None
    view, shape = ALGORITHMS[group["algorithm"]].view(group), _radius_shape(group, param)
    axis = 0 if view is None else view.split_axis(param.shape)
    sizes = None if view is None else view.sizes(param.shape)
    count = shape.numel() if sizes is None else shape.numel() // shape[axis] * len(sizes)
    apart = _axes_apart(group, param)
    here = Region(tuple(cut for cut in box(offset(param), item.param.shape).cuts if cut[0] in apart))
    return ShardedWeights(layout.grid.groups, count, shard_numbers(shape, sizes, axis, here, item.param.device))


# the norm that a weight is to have


def _axes_apart(group: Group, param: Tensor) -> set[int]:
    """The axes along which elements belong to different weights."""
    view = ALGORITHMS[group["algorithm"]].view(group)
    split = {view.split_axis(param.shape)} if view is not None and view.sizes(param.shape) is not None else set()
    return split | set(range(param.dim())).difference(axis + param.dim() for axis in norm_axes(group, param))


def _radius_shape(group: Group, param: Tensor) -> torch.Size:
    """The axes of a parameter, of length one where all elements belong to the same weight."""
    apart = _axes_apart(group, param)
    return torch.Size(length if axis in apart else 1 for axis, length in enumerate(param.shape))


def radius_placements(group: Group, param: Tensor) -> tuple[Any, ...]:
    """How the radius of a DTensor lies over ranks: cut like it, but copied along axes within a weight."""
    from torch.distributed.tensor import Replicate

    apart = _axes_apart(group, param)
    places: Sequence[Any] = as_dtensor(param).placements
    return tuple(one if one.is_replicate() or one.dim in apart else Replicate() for one in places)


def initial_radius(group: Group, name: str, param: Tensor) -> Tensor:
    """The norm of each weight in a parameter, for each element along the axes that tell weights apart.

    It has the axes of the parameter, of length one where all elements belong to the same weight, so that whatever cuts
    a part out of the parameter cuts its radius out of this.
    """
    axes, wide = norm_axes(group, param), param.detach().to(wide_dtype(param.dtype))
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
    _refuse_zero(group, name, param, radius)
    return radius


def _refuse_zero(group: Group, name: str, param: Tensor, radius: Tensor) -> None:
    """Refuse weights of norm zero, but not those without elements."""
    if param.numel() and not bool((radius > 0).all()):
        raise ValueError(
            f"{name} holds a weight of norm zero, which norm={group['norm']!r} would keep there; give target_norm=, or "
            f"a group with norm='free' for it"
        )


def missing_radii(work: Sequence[Batch], sharded: ShardedNorms) -> MissingState:
    """The radius of each weight that has none yet; one of zero is an error.

    It is a collective, and every rank takes part before one finds an error.
    """
    lacking = [
        (batch.group, item)
        for batch in work
        if state_keys(batch.group)
        for item in batch.items
        if "radius" not in item.state
    ]
    apart = [item for _, item in lacking if sharded.of(item) is not None]
    reduced = {id(item): norm for item, norm in zip(apart, sharded.norms(apart), strict=True)}
    return [(item.state, "radius", _first_radius(group, item, reduced.get(id(item)))) for group, item in lacking]


def _first_radius(group: Group, item: Item, norm: Tensor | None) -> Tensor:
    """The radius as a parameter's state keeps it, from the norms of sharded weights or of the whole ones here."""
    if norm is None:
        radius = initial_radius(group, item.name, item.param)
    else:
        _refuse_zero(group, item.name, item.parameter, norm)
        radius = norm.to(wide_dtype(item.param.dtype))
    if item.whole is None:
        return radius
    return beside(item.whole, radius, radius_placements(group, item.whole), _radius_shape(group, item.whole))


def state_keys(group: Group) -> tuple[str, ...]:
    """What a parameter's state must remember for the rule."""
    rule = acting(group)
    return ("radius",) if rule is not None and rule.uses_radius and group["target_norm"] is None else ()


def without_radius(groups: Sequence[Group], state: dict[Tensor, Any]) -> int:
    """How many parameters lack the radius that their rule keeps."""
    ruled = [group for group in groups if state_keys(group)]
    return sum("radius" not in state.get(param, ()) for group in ruled for param in group["params"])
