"""Measure one step of any torch optimizer from a copy of the weights.

With W before the step, W' after it and phi the decay factor, the update is `u = (1 - phi) W - W'`. Rounding hides it in
low-precision weights. For our optimizers u is then computed again, from copies of their state; for others it is the
stored change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vecdot
from torch.optim import Optimizer

from muonsw.addons.norm_rules import sum_over_ranks
from muonsw.codecs import decode, decode_items, is_code
from muonsw.distributed.shards import is_dtensor, local, local_gradient, put_state, shard_like, whole
from muonsw.matrices import Region
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.precision import LOW_PRECISION, SCALE
from muonsw.slots import wide_dtype
from muonsw.state import layouts, zeros
from muonsw.step import chunk_bytes, update_batch
from muonsw.telemetry.record import MEASURED, SQUARES, Measured, ParameterInfo, measured
from muonsw.work import Batch, Group, Item, StepContext

# Updates below this many rounding units of the weight count as zero.
ROUNDING = 4

# Rows longer than this are summed in pieces, because float32 sums lose digits with their length.
LONGEST = 2**16

# torch's optimizers with decoupled decay.
_DECOUPLED = (torch.optim.AdamW, torch.optim.Muon)

# Power iteration on a block of vectors: the error falls with the gap to the first singular value outside the block.
BLOCK, ITERATIONS = 8, 12


class Before(NamedTuple):
    """Copies before a step: the weight, the state if u is recomputed, the gradient if the optimizer is not ours."""

    weight: Tensor
    state: dict[str, Tensor] | None
    gradient: Tensor | None


def copies(optimizer: Optimizer, *, closure: bool) -> dict[Tensor, Before]:
    """Copy the weights that the step may move; before a closure runs there are no gradients."""
    ours = isinstance(optimizer, ScaledDecayOptimizer)
    has_copies = isinstance(optimizer, ScaledDecayOptimizer) and optimizer._ranks.process_group is not None
    before = {}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        shared = has_copies or is_dtensor(param)  # another rank may have the gradient
        if param.grad is None and not shared and not (closure and param.requires_grad):
            continue
        weight, state, gradient = param.detach().clone(), None, None
        if ours and param.dtype in LOW_PRECISION:
            state = {
                key: value.clone() if is_dtensor(value) else value.to(local(param).device, copy=True)
                for key, value in optimizer.state.get(param, {}).items()
            }
        if not ours and not closure:
            gradient = param.grad.clone()  # some optimizers overwrite it
        before[param] = Before(weight, state, gradient)
    return before


def measure(
    optimizer: Optimizer,
    infos: Mapping[Tensor, ParameterInfo],
    before: Mapping[Tensor, Before],
    spectra: Sequence[str],
    *,
    was_skipped: bool,
) -> list[Measured]:
    """Measure the copied parameters; a collective for sharded ones, even on ranks with an empty shard."""
    ours = optimizer if isinstance(optimizer, ScaledDecayOptimizer) else None
    tables = {
        param: torch.zeros(len(MEASURED), info.matrices.shape.numel(), dtype=torch.float64, device="cpu")
        for param, info in infos.items()
    }
    rows, spectra_of = [], {}
    for param, copied in before.items():
        info, update = infos[param], None
        cells = [cell for cell in info.matrices.cells if param.numel() and cell.rows * cell.columns]
        if cells and spectra:
            W = whole(copied.weight)
            batches = [cell.region.of(W).reshape(-1, cell.rows, cell.columns) for cell in cells]
            spectra_of[param] = {name: torch.cat(list(map(SPECTRA[name], batches))) for name in spectra}
        if ours is not None and copied.state is not None and info.decay is not None and not was_skipped:
            update = _intended_update(ours, info, param, copied.weight, copied.state)
        rows += _norms_and_products(optimizer, info, param, copied, update)
    for param, numbers, area, values in rows:  # last, because each transfer waits for the device
        tables[param][0, numbers] = area
        tables[param][1:, numbers] = values.cpu().double()
    for table in tables.values():
        table[1 : 1 + len(SQUARES)].square_()
        # Overflows become NaN: dividing by infinity would report an alignment or relative size of zero.
        table[~table.isfinite()] = torch.nan
    if ours is not None:
        tables = dict(zip(tables, sum_over_ranks(ours, list(tables), list(tables.values())), strict=True))
    entries = [measured(info, tables[param], spectra_of.get(param, {})) for param, info in infos.items()]
    return [entry for entry in entries if entry.matrices]


def _norms_and_products(
    optimizer: Optimizer, info: ParameterInfo, param: Tensor, before: Before, intended: Tensor | None
) -> list[tuple[Tensor, Tensor, int, Tensor]]:
    """Norms and inner products of this rank's matrices, batched by area.

    Returns the parameter, the indices of its matrices, their area, and a row of values per name in `MEASURED`.
    """
    momentum, state = None, optimizer.state.get(param, {})
    for key in ("exp_avg", "momentum_buffer"):
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape == param.shape:
            momentum = local(value).to(local(param).device)
            if is_code(momentum):
                momentum = decode(momentum, local(state[f"{key}{SCALE}"]).to(momentum.device))
    grad = _local_gradient(param) if before.gradient is None else before.gradient
    grad = grad.to_dense() if grad is not None and grad.is_sparse else grad

    held, stack, dtype = local(param), info.matrices.stack, wide_dtype(param.dtype)
    places = torch.arange(info.matrices.shape.numel(), dtype=torch.int64, device="cpu").view(info.matrices.shape)
    by_area: dict[int, list[tuple[Region, Tensor]]] = {}
    for part, index in info.matrices.here(param):
        shape = part.shape_in(held.shape)
        if shape.numel():
            by_area.setdefault(shape[len(stack) :].numel(), []).append((part, places[index].flatten()))
    measured = []
    for area, parts in by_area.items():

        def rows(tensor: Tensor, area: int = area, parts: list[tuple[Region, Tensor]] = parts) -> Tensor:
            pieces = [part.of(local(tensor)).reshape(-1, area) for part, _ in parts]
            return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).to(dtype)

        w = rows(before.weight)
        change = rows(param.detach()) - w
        u = -change if intended is None else rows(intended)
        decayed = w
        if isinstance(optimizer, ScaledDecayOptimizer) and info.group["cautious"]:
            # an inward update has the weight's sign, with or without decay in it
            same = w.sign() * u.sign()
            decayed = torch.where(same > 0 if intended is None else same >= 0, w, 0)
        if intended is None and info.decay:
            u.sub_(decayed, alpha=info.decay)
        values = {
            "ww": norms(w),
            "dd": norms(change),
            "decayed": norms(decayed),
            "uu": norms(u),
            "wu": vecdot(w, u),
        }
        if intended is None:
            lost = values["uu"] <= ROUNDING * torch.finfo(w.dtype).eps * values["ww"]
            values |= {key: torch.where(lost, 0.0, values[key]) for key in ("uu", "wu")}
        if grad is not None:
            g = rows(grad)
            values |= {"gg": norms(g), "wg": vecdot(w, g)}
        if momentum is not None:
            m = rows(momentum)
            values |= {"mm": norms(m), "wm": vecdot(w, m), "ww_momentum": values["ww"]}
        zero = torch.zeros_like(values["ww"])
        numbers = torch.cat([numbers for _, numbers in parts])
        measured.append((param, numbers, area, torch.stack([values.get(name, zero) for name in MEASURED[1:]])))
    return measured


def _intended_update(
    ours: ScaledDecayOptimizer, info: ParameterInfo, param: Tensor, weight: Tensor, state: dict[str, Tensor]
) -> Tensor:
    """The unrounded update of this rank's shard, from a second step on float32 zeros.

    For a sharded parameter this is a collective, and every rank computes the whole update.
    """
    group, grad = info.group, _local_gradient(param)
    grad = torch.zeros_like(local(weight)) if grad is None else grad
    grad = whole(shard_like(param, grad)) if is_dtensor(param) else grad
    state = {key: whole(value) for key, value in state.items()}
    weight = whole(weight)
    for key, layout in layouts(group, weight).items():
        state.setdefault(key, zeros(layout, weight))
    if "step" in state:
        state["step"].add_(1)
    moved = torch.zeros_like(weight, dtype=wide_dtype(weight.dtype))
    (item,) = decode_items(group, [Item(0, info.name, moved, grad.to(moved.dtype), state)])
    batch = Batch(0, group, moved.device, moved.dtype, [moved], [item], info.view)
    ctx = StepContext(info.lr, 0.0, chunk_bytes(ours, moved.device))
    update_batch(batch, [item], ctx, is_decoded=True)
    moved.neg_()
    return local(put_state(param, moved, param.placements)) if is_dtensor(param) else moved


def norms(x: Tensor) -> Tensor:
    """Euclidean norms of the rows of a (rows, elements) tensor."""
    pieces = x.shape[1] // LONGEST
    long, rest = x.tensor_split([pieces * LONGEST], dim=1)
    parts = [torch.linalg.vector_norm(long.reshape(len(x), pieces, LONGEST), dim=2)]
    parts.append(torch.linalg.vector_norm(rest, dim=1, keepdim=True))
    lengths: Tensor = torch.linalg.vector_norm(torch.cat(parts, dim=1), dim=1)
    return lengths


def _local_gradient(param: Tensor) -> Tensor | None:
    """This rank's part of a gradient; None where only other ranks have one."""
    if param.grad is None or not is_dtensor(param):
        return param.grad
    return local_gradient("a parameter", param, param.grad)


def known_decay(optimizer: Optimizer, group: Group) -> float | None:
    """The decay factor of a group of another optimizer, or None if it is unknown.

    It is known without decay, for torch's decoupled optimizers, and under `scale_weight_decay`.
    """
    lam, lr = group.get("weight_decay"), group.get("lr")
    if isinstance(lam, int | float) and lam == 0:
        return 0.0
    decoupled = isinstance(optimizer, _DECOUPLED) or group.get("decoupled_weight_decay") is True
    return None if lam is None or lr is None or not (decoupled or "base_weight_decay" in group) else float(lr * lam)


def spectral_norms(batch: Tensor) -> Tensor:
    """The largest singular value of each matrix, by power iteration from fixed random vectors."""
    W = batch.to(wide_dtype(batch.dtype))
    shape = (W.shape[0], W.shape[2], min(BLOCK, *W.shape[1:]))
    V = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu").to(W)
    for _ in range(ITERATIONS):
        V = torch.linalg.qr(W.mT @ (W @ (W.mT @ (W @ V)))).Q
    image = (W @ V).double()
    return _eigenvalues(image.mT @ image)[:, -1].clamp(min=0).sqrt()


def condition_numbers(batch: Tensor) -> Tensor:
    """Largest over smallest singular value of each matrix; infinite beyond about 1e7.

    Uses an eigendecomposition of the smaller Gram matrix in float64.
    """
    W = batch.double()
    gram = W @ W.mT if W.shape[1] <= W.shape[2] else W.mT @ W
    eigenvalues = _eigenvalues(gram)
    noise = eigenvalues[:, -1] * gram.shape[-1] * torch.finfo(torch.float64).eps
    smallest = torch.where(eigenvalues[:, 0] > noise, eigenvalues[:, 0], 0.0)
    return (eigenvalues[:, -1] / smallest).sqrt()


def _eigenvalues(gram: Tensor) -> Tensor:
    """Ascending eigenvalues of symmetric matrices (count, n, n); NaN for a matrix that is not finite."""
    finite = gram.isfinite().all(-1).all(-1, keepdim=True)
    values: Tensor = torch.linalg.eigvalsh(torch.where(finite.unsqueeze(-1), gram, 0.0))
    return torch.where(finite, values, torch.nan)


SPECTRA = {"spectral_norm": spectral_norms, "condition": condition_numbers}
