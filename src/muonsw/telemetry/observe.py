"""Measure one step of any torch optimizer from a copy of the weights, and describe it in a record.

With W before the step, W' after it and phi the decay factor, the update is `u = (1 - phi) W - W'`. Rounding hides it in
low-precision weights. For our optimizers u is then computed again, from copies of their state; for others it is the
stored change.

Each matrix (an expert of a stack, a part of a fused projection, or a whole tensor) has squared norms and inner products
of its weight, gradient, update and momentum. These add up over ranks, matrices, roles and layers; a record's means and
cosines are computed from the sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vecdot
from torch.optim import Optimizer

from muonsw import peak
from muonsw.addons.norm_rules import Matrices, acts, sum_over_ranks
from muonsw.algorithms import ALGORITHMS
from muonsw.codecs import decode, decode_items, is_code
from muonsw.decay import needs_peak
from muonsw.distributed.shards import is_dtensor, local, local_gradient, put_state, shard_like, whole
from muonsw.matrices import MatrixView, Region
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.precision import LOW_PRECISION, SCALE
from muonsw.routing.roles import RoutedParameter
from muonsw.slots import wide_dtype
from muonsw.state import layouts, zeros
from muonsw.step import chunk_bytes, update_batch
from muonsw.telemetry.sinks import Record
from muonsw.work import Batch, Group, Item, StepContext, named_params

# Updates below this many rounding units of the weight count as zero.
ROUNDING = 4

# Rows longer than this are summed in pieces, because float32 sums lose digits with their length.
LONGEST = 2**16

# torch's optimizers with decoupled decay.
_DECOUPLED = (torch.optim.AdamW, torch.optim.Muon)

# Power iteration on a block of vectors: the error falls with the gap to the first singular value outside the block.
BLOCK, ITERATIONS = 8, 12

# w is the weight before the step, u the update, g the gradient, m the momentum after the step, d the change of the
# stored weight, `decayed` the elements of w that decay acts on, `ww_momentum` the square of w if it has a momentum.
SQUARES = ("ww", "ww_momentum", "decayed", "uu", "gg", "mm", "dd")
PRODUCTS = ("wu", "wg", "wm")
MEASURED = ("numel", *SQUARES, *PRODUCTS)

# Each cosine: its inner product and the two squared norms.
ALIGNMENTS = {
    "alignment_update": ("wu", "ww", "uu"),
    "alignment_gradient": ("wg", "ww", "gg"),
    "alignment_momentum": ("wm", "ww_momentum", "mm"),
}
SETTINGS = ("decay", "lr", "peak_lr")
# Values that only matrices have.
PER_MATRIX = ("defect", "spectral_norm", "condition")
MEANS = (*(f"{name}_mean" for name in ALIGNMENTS), *SETTINGS, *PER_MATRIX)
# Values that a skipped step has.
KNOWN_WHEN_SKIPPED = ("weight_rms", "lr", "peak_lr", "spectral_norm", "condition", "numel")


class Before(NamedTuple):
    """Copies before a step: the weight, the state if u is recomputed, the gradient if the optimizer is not ours."""

    weight: Tensor
    state: dict[str, Tensor] | None
    gradient: Tensor | None


class ParameterInfo(NamedTuple):
    """Facts about a parameter at this step that need no measurement."""

    group: Group
    name: str
    role: str | None
    layer: str | None
    decayed: bool  # whether its group has a weight decay
    lr: float
    peak_lr: float | None
    decay: float | None  # phi, None if unknown
    view: MatrixView | None  # as the step's algorithm saw it
    matrices: Matrices
    lengths: list[float]  # the norm of an orthogonal update of each cell, 0 if there is none


class Measured(NamedTuple):
    """One parameter: sums over its matrices for each name in `MEASURED`, and means with their weights."""

    info: ParameterInfo
    matrices: int
    sums: dict[str, float]
    means: dict[str, tuple[float, float]]


def copies(optimizer: Optimizer, *, closure: bool) -> dict[Tensor, Before]:
    """Copy the weights that the step may move; before a closure runs there are no gradients."""
    ours = optimizer if isinstance(optimizer, ScaledDecayOptimizer) else None
    before = {}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        # another rank may have the gradient
        shared = is_dtensor(param) or (ours is not None and ours._ranks.process_group is not None)
        if param.grad is None and not shared and not (closure and param.requires_grad):
            continue
        weight, state, gradient = param.detach().clone(), None, None
        if ours is not None and param.dtype in LOW_PRECISION:
            state = {
                key: value.clone() if is_dtensor(value) else value.to(local(param).device, copy=True)
                for key, value in ours.state.get(param, {}).items()
            }
        if ours is None and not closure:
            gradient = param.grad.clone()  # some optimizers overwrite it
        before[param] = Before(weight, state, gradient)
    return before


def describe_step(
    optimizer: Optimizer,
    model: Mapping[Tensor, RoutedParameter],
    before: Mapping[Tensor, Before],
    phis: Sequence[float | None],
    spectra: Sequence[str],
    *,
    was_skipped: bool,
    parameters: bool,
) -> Record:
    """The values of all copied parameters, and by role, layer and name, given each group's decay.

    A collective for sharded parameters, even on ranks with an empty shard.
    """
    infos = parameter_infos(optimizer, model, phis)
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
    entries = [entry for entry in entries if entry.matrices]

    def pooled(key: str) -> Record:
        members: dict[str | None, list[Measured]] = {}
        for entry in entries:
            members.setdefault(getattr(entry.info, key), []).append(entry)
        return {value: describe(chosen, was_skipped) for value, chosen in members.items() if value is not None}

    layers = pooled("layer")
    record: Record = {
        "all": describe(entries, was_skipped),
        "decayed": describe([entry for entry in entries if entry.info.decayed], was_skipped),
        "roles": pooled("role"),
        "layers": {layer: layers[layer] for layer in sorted(layers, key=int)},
    }
    if parameters:
        record["parameters"] = {entry.info.name: describe([entry], was_skipped) for entry in entries}
        for entry in entries:
            for name in ALIGNMENTS if entry.matrices == 1 else ():  # the mean over one matrix adds nothing
                del record["parameters"][entry.info.name][f"{name}_mean"]
    return record


def parameter_infos(
    optimizer: Optimizer, model: Mapping[Tensor, RoutedParameter], phis: Sequence[float | None]
) -> dict[Tensor, ParameterInfo]:
    """Describe every parameter, given each group's decay; waits for learning rates in device tensors."""
    infos = {}
    for number, (group, phi) in enumerate(zip(optimizer.param_groups, phis, strict=True)):
        lam = group.get("base_weight_decay", group.get("weight_decay"))
        lr, decayed, peak_lr, view = float(group.get("lr", math.nan)), bool(lam), None, None
        settings = {"peak": "group", **group, "weight_decay": lam}
        if "resolved_peak_lr" in group and needs_peak(settings):
            peak_lr = peak.eta_max(settings)
        rule = ALGORITHMS[group["algorithm"]] if isinstance(optimizer, ScaledDecayOptimizer) else None
        if rule is not None:
            view = rule.view(group)
            if view is not None and group.get("block_period") and group["update_count"] % group["block_period"] == 0:
                view = view.unsplit()  # as the step did
        for place, param in named_params(group, number):
            routed = model.get(param)
            name = routed.name if routed and not group.get("param_names") else place
            matrices = Matrices.of(group, param.shape, view, routed and routed.view.get("matrix"))
            lengths = [0.0] * len(matrices.cells)
            if rule is not None and group["algorithm"] == "muon" and not acts(group):
                assert view is not None
                assert rule.matrices is not None
                sizes = [(cell.rows, cell.columns) for cell in matrices.cells]
                lengths = [lr * rule.matrices.scale(group, *view.out_in(*size)) * min(size) ** 0.5 for size in sizes]
            layer = next((str(int(word)) for word in name.split(".") if word.isdecimal()), None)
            role = group.get("role") or (routed and routed.role)
            infos[param] = ParameterInfo(group, name, role, layer, decayed, lr, peak_lr, phi, view, matrices, lengths)
    return infos


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
    grad = local_gradient(param) if before.gradient is None else before.gradient
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
    group, grad = info.group, local_gradient(param)
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
    update_batch(batch, [item], ctx)
    moved.neg_()
    return local(put_state(param, moved, param.placements)) if is_dtensor(param) else moved


def norms(x: Tensor) -> Tensor:
    """Euclidean norms of the rows of a (rows, elements) tensor."""
    pieces = x.shape[1] // LONGEST
    long, tail = x.tensor_split([pieces * LONGEST], dim=1)
    parts = [torch.linalg.vector_norm(long.reshape(len(x), pieces, LONGEST), dim=2)]
    parts.append(torch.linalg.vector_norm(tail, dim=1, keepdim=True))
    lengths: Tensor = torch.linalg.vector_norm(torch.cat(parts, dim=1), dim=1)
    return lengths


def measured(info: ParameterInfo, table: Tensor, spectra: dict[str, Tensor]) -> Measured:
    exist = table[0] > 0
    of = dict(zip(MEASURED, table[:, exist], strict=True))
    sums = {name: float(values.sum()) for name, values in of.items()}
    means = {name: (value, sums["numel"]) for name in SETTINGS if (value := getattr(info, name)) is not None}
    if sums["ww"] != 0 and info.decay is not None:  # cautious decay spares some elements
        means["decay"] = info.decay * sums["decayed"] / sums["ww"], sums["numel"]
    for name, (product, left, right) in ALIGNMENTS.items():
        defined = (of[left] != 0) & (of[right] != 0)  # includes NaN, which must show
        if defined.any():
            x, y = of[left][defined].sqrt(), of[right][defined].sqrt()
            means[f"{name}_mean"] = float((of[product][defined] / (x * y)).clamp(-1, 1).mean()), 1
    lengths = table.new_tensor(info.lengths).repeat_interleave(info.matrices.stack.numel())[exist]
    values = {"defect": (of["uu"].sqrt() / lengths)[lengths > 0], **spectra}
    means |= {name: (float(each.mean()), len(each)) for name, each in values.items() if len(each)}
    return Measured(info, int(exist.sum()), sums, means)


def describe(entries: Sequence[Measured], was_skipped: bool) -> Record:
    """The values of several parameters together, None if a value is undefined or not finite."""
    total = {name: sum(entry.sums[name] for entry in entries) for name in MEASURED}
    values = {
        "weight_rms": math.sqrt(_ratio(total["ww"], total["numel"])),
        "update_rms": math.sqrt(_ratio(total["uu"], total["numel"])),
        "relative_update": math.sqrt(_ratio(total["uu"], total["ww"])),
        "applied_rms": math.sqrt(_ratio(total["dd"], total["numel"])),
        "gradient_rms": math.sqrt(_ratio(total["gg"], total["numel"])),
    }
    for name, (product, left, right) in ALIGNMENTS.items():
        cosine = _ratio(total[product], math.sqrt(total[left]) * math.sqrt(total[right]))
        values[name] = cosine if math.isnan(cosine) else max(-1.0, min(1.0, cosine))  # against rounding
    for name in MEANS:
        pairs = [entry.means[name] for entry in entries if name in entry.means]
        if pairs or name not in PER_MATRIX:
            values[name] = _ratio(sum(value * weight for value, weight in pairs), sum(weight for _, weight in pairs))
    # A skipped step has no update, so its size must be None and not zero.
    unknown = values.keys() - KNOWN_WHEN_SKIPPED if was_skipped else ()
    finite = {name: value if math.isfinite(value) and name not in unknown else None for name, value in values.items()}
    return {**finite, "numel": int(total["numel"])}


def _ratio(x: float, y: float) -> float:
    return x / y if y else math.nan


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
