"""The one place where weights change: `W <- (1 - phi) W - eta * scale * direction`, or as a norm rule says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from muonsw import kernels, norms
from muonsw.algorithms.base import FusedUpdate, Rates, Update, kernel_weights, rounding_key, subtract
from muonsw.matrices import Part, views
from muonsw.precision import LOW_PRECISION, mix, stochastic_round
from muonsw.work import Group, copy_flattened_, flattened

ROUNDINGS = ("stochastic", "nearest")

# Elements of small weights that a CPU rounds in one buffer: it fits in the cache, and larger weights stay alone.
ROUNDED_TOGETHER = 2**18


def apply_update(group: Group, update: Update | FusedUpdate, rates: Rates) -> None:
    """Decay the weights of an update's parts and move them along its directions."""
    if isinstance(update, FusedUpdate):
        update.take(rates)
        increment_version([part.item.parameter for part in update.parts])  # which fused kernels leave alone
        return
    weights = views(update.parts, [part.item.param for part in update.parts])
    if rates.norm is not None:
        _apply_norm_rule(group, update, weights, rates, rates.norm)
        return
    if (
        group["fused"] is not False
        and kernels.available(weights[0].device)
        and _apply_in_one_pass(group, update, weights, rates)
    ):
        return
    eta, phi = rates.applied(weights[0].dtype)
    move, directions = eta * update.scale, update.stretched
    if weights[0].dtype in LOW_PRECISION and group["rounding"] != "nearest":
        for some in _rounded_together(weights):
            _apply_rounded(group, update.parts[some], weights[some], directions[some], move, phi, rates.ok)
    else:
        shrink_and_move(weights, directions, move, phi, group["cautious"])


def _apply_in_one_pass(group: Group, update: Update, weights: list[Tensor], rates: Rates) -> bool:
    """The same by a kernel; False, and nothing done, where there is none for this layout."""
    from muonsw.kernels.elementwise import Motion
    from muonsw.kernels.move import move

    motion = Motion(rates.eta, rates.phi, rates.flag, update.scale, group["cautious"])
    given, factors = kernel_weights(group, update.parts, weights), update.row_factors
    if factors is None:
        return move(given, update.directions, motion)
    columns = sum(weight.numel() for weight in weights) // factors.numel()
    return move(given, update.directions, motion, factors, columns)


def shrink_and_move(
    weights: list[Tensor],
    directions: list[Tensor],
    move: float | Tensor,
    phi: float | Tensor,
    cautious: bool,
) -> None:
    """`W <- (1 - phi) W - move * direction`, in place; cautious decay spares entries that move outward."""
    if isinstance(phi, Tensor) or phi != 0:
        if cautious:
            for weight, direction in zip(weights, directions, strict=True):
                weight.sub_(torch.where(weight * direction >= 0, weight, 0) * phi)
        else:
            subtract(weights, phi, weights)
    subtract(weights, move, directions)


def _rounded_together(weights: list[Tensor]) -> Iterator[slice]:
    """Which weights are rounded in one buffer; on accelerators each alone, as graphs take nothing from the host."""
    most = ROUNDED_TOGETHER if weights[0].device.type == "cpu" else 0
    begin, room = 0, most
    for place, weight in enumerate(weights):
        if place > begin and weight.numel() > room:
            yield slice(begin, place)
            begin, room = place, most
        room -= weight.numel()
    yield slice(begin, len(weights))


def _apply_rounded(
    group: Group,
    parts: list[Part],
    weights: list[Tensor],
    directions: list[Tensor],
    move: float | Tensor,
    phi: float | Tensor,
    ok: Tensor | None,
) -> None:
    """Decay and move low-precision weights in one float32 pass.

    A thousand bfloat16 decays of 1e-3, each rounded to nearest, would leave the weight where it was.
    """
    wide = flattened(weights).float()
    shrink_and_move([wide], [flattened(directions).float()], move, phi, group["cautious"])
    _store(group, parts, weights, wide, ok)


def _apply_norm_rule(group: Group, update: Update, weights: list[Tensor], rates: Rates, rule: norms.NormRule) -> None:
    """Move weights whose norm is not free: `W <- W - (1 - a) W - b U`, with the rule's a and b for each weight."""
    if isinstance(rates.eta, float) and rates.eta == 0:
        return  # whatever the rule, up to rounding
    assert update.norms is not None
    eta, phi = rates.applied(weights[0].dtype)
    ok = rates.ok
    if isinstance(rates.eta, Tensor):
        ok = rates.eta != 0 if ok is None else ok & (rates.eta != 0)
    lengths: Sequence[float | Tensor] = update.lengths or [update.scale] * len(weights)
    columns = zip(update.parts, weights, update.directions, update.norms, lengths, strict=True)
    for part, weight, direction, known, length in columns:
        low = weight.dtype in LOW_PRECISION
        wide = weight.float() if low else weight
        a, b = rule.coefficients(known, eta * length, phi, group)
        taken, moved_by = ((one * torch.ones_like(known.W)).to(wide.dtype) for one in (1 - a, b))
        moved = torch.addcmul(wide, wide, taken, value=-1).addcmul_(direction.to(wide.dtype), moved_by, value=-1)
        _store(group, [part], [weight], moved.reshape(-1), ok)


def _store(group: Group, parts: list[Part], weights: list[Tensor], wide: Tensor, ok: Tensor | None) -> None:
    """Round a vector into the weights that it was made of, unless `ok` is false."""
    dtype = weights[0].dtype
    rounding = group["rounding"] if dtype in LOW_PRECISION else "nearest"
    if rounding == "stochastic":
        sizes = [weight.numel() for weight in weights]
        rounded = stochastic_round(wide, dtype, rounding_seeds(group, parts), sizes)
    else:
        rounded = wide.to(dtype)
    copy_flattened_(weights, rounded if ok is None else torch.where(ok, rounded, flattened(weights)))


def rounding_seeds(group: Group, parts: list[Part]) -> Tensor:
    """A number for each of these parts at this step; the step is counted in the state."""
    steps = torch.stack([part.item.state["step"] for part in parts]).to(torch.int32)
    keys = [rounding_key(group, part) for part in parts]
    return mix(steps ^ (keys[0] if len(keys) == 1 else torch.tensor(keys, dtype=torch.int32, device=steps.device)))
