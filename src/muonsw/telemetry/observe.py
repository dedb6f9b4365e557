"""Measure one step of any torch optimizer from a copy of the weights.

With W before the step, W' after it and phi the fraction that decay takes, the update is `u = (1 - phi) W - W'`. Weights
of low precision do not show it: rounding moves them by more, or not at all. Our optimizers then compute u a second
time, from copies of their state; for others it is the change that was stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from muonsw.addons.norm_rules import FREE
from muonsw.algorithms import ALGORITHMS
from muonsw.codecs import decode, decode_items, is_code
from muonsw.distributed.shards import as_dtensor, is_dtensor, local, local_gradient, put_state, shard_like, whole
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.precision import LOW_PRECISION, SCALE
from muonsw.slots import wide_dtype
from muonsw.state import layouts, zeros
from muonsw.step import chunk_bytes, update_batch
from muonsw.summary import Summary
from muonsw.telemetry.record import MEASURED, SQUARES, Matrices, ModelView, ParameterInfo, Rows, Sample, parameter_infos
from muonsw.work import Batch, Group, Item, StepContext

# An update that is smaller than a weight by this many units of rounding cannot be told from none.
ROUNDING = 4

# Rows of more elements than this are summed in pieces: float32 sums lose digits with their length.
LONGEST = 2**16

# torch optimizers that shrink weights by lr * weight_decay before they move them.
_DECOUPLED = (torch.optim.AdamW, torch.optim.Muon)

# Vectors that are iterated together: the error falls with the gap to the singular value after the last of them.
BLOCK = 8
# Iterations from random vectors, and from those of the last sample, since when a weight has moved little.
COLD, WARM = 12, 4

_ANNOUNCEMENT = (
    "telemetry that measures this step (attach it on every rank, with the same `every` and `start_step`, and give the "
    "sink to one of them)"
)


class Before(NamedTuple):
    """Copies before a step: the weight, the state if u is computed again, the gradient if the optimizer is not ours."""

    weight: Tensor
    state: dict[str, Tensor] | None
    gradient: Tensor | None


class Observer:
    """Copies the weights before a sampled step and measures them after it."""

    def __init__(self, optimizer: Optimizer, view: ModelView, spectrum: Spectrum) -> None:
        self.optimizer = optimizer
        self.view = view
        self.spectrum = spectrum
        self.ours = optimizer if isinstance(optimizer, ScaledDecayOptimizer) else None
        # Our optimizers count skipped steps themselves; those before telemetry was attached do not matter.
        self._skipped = 0 if self.ours is None else -self.ours.skipped_steps
        self._before: dict[Tensor, Before] = {}

    def begin(self, closure: bool) -> None:
        """Copy the weights that the step may move; with a closure there are no gradients yet."""
        self.stop()
        ranks = None if self.ours is None else self.ours._ranks
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                # where ranks share parameters, another one may have the gradient
                shared = is_dtensor(param) or (ranks is not None and ranks.process_group is not None)
                if param.grad is None and not shared and not (closure and param.requires_grad):
                    continue
                weight, state, gradient = param.detach().clone(), None, None
                if self.ours is not None and param.dtype in LOW_PRECISION:
                    state = {
                        key: value.clone() if is_dtensor(value) else value.to(local(param).device, copy=True)
                        for key, value in self.ours.state.get(param, {}).items()
                    }
                if self.ours is None and not closure:
                    gradient = param.grad.clone()  # some optimizers overwrite it
                self._before[param] = Before(weight, state, gradient)
        if ranks is not None and any(map(is_dtensor, self._before)):
            ranks.announced.append(_ANNOUNCEMENT)

    def stop(self) -> None:
        self._before = {}
        if self.ours is not None and _ANNOUNCEMENT in self.ours._ranks.announced:
            self.ours._ranks.announced.remove(_ANNOUNCEMENT)

    def finish(self, summary: Summary | None) -> Sample:
        """Measure what the step has done; `summary` is that of our own optimizers."""
        if self.ours is not None and summary is not None:
            was_skipped, skipped = summary.skipped, self._skipped + summary.skipped_steps
            stepped = {param for _, params, _ in self.ours._last for param in params}
            # a norm rule takes another share of every weight
            phis = [group.decay if group.norm == FREE else None for group in summary.groups]
        else:
            found_inf = getattr(self.optimizer, "found_inf", None)  # a GradScaler makes fused kernels skip
            was_skipped = isinstance(found_inf, Tensor) and bool(found_inf)
            self._skipped += was_skipped
            skipped, stepped = self._skipped, {param for param in self._before if param.grad is not None}
            phis = [known_decay(self.optimizer, group) for group in self.optimizer.param_groups]
        infos = parameter_infos(self.optimizer, self.view, phis)
        sample = Sample(infos, {}, {}, skipped, was_skipped)
        measured = []
        for param in [param for param in infos if param in stepped and param in self._before]:
            info, before, update = infos[param], self._before[param], None
            # Both are collectives for a sharded parameter, also on a rank that holds nothing of it.
            sample.spectra[param] = self.spectrum.measure(param, info.matrices, before.weight)
            if before.state is not None and info.decay is not None and not was_skipped:
                update = self._intended_update(info, param, before.weight, before.state)
            measured += [(param, *found) for found in self._measure(info, param, before, update)]
        for param, info in infos.items():
            total = info.matrices.total
            sample.tables[param] = torch.zeros(len(MEASURED), total, dtype=torch.float64, device="cpu")
        for param, rows, values in measured:  # only now, because each transfer waits for the device
            sample.tables[param][0, rows.numbers] = rows.area
            sample.tables[param][1:, rows.numbers] = values.cpu().double()
        self._sum_over_ranks(sample.tables)
        self.stop()
        return sample

    def _sum_over_ranks(self, tables: dict[Tensor, Tensor]) -> None:
        """Square the norms and add up what each rank holds of a sharded parameter."""
        shared: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
        for param, table in tables.items():
            table[1 : 1 + len(SQUARES)].square_()
            # What has overflowed is NaN: over infinity an alignment or a relative size would be zero.
            table[~table.isfinite()] = torch.nan
            groups = () if self.ours is None else self.ours._ranks.layouts.sharding_groups(param)
            if groups:
                shared.setdefault(groups, []).append(param)
        for groups, params in shared.items():  # one reduction for all parameters of the same ranks
            total = torch.cat([tables[param] for param in params], dim=1).to(local(params[0]).device)
            for group in groups:
                dist.all_reduce(total, group=group)
            parts = torch.split(total.cpu(), [tables[param].shape[1] for param in params], dim=1)
            tables.update(zip(params, parts, strict=True))

    def _measure(
        self, info: ParameterInfo, param: Tensor, before: Before, intended: Tensor | None
    ) -> Iterator[tuple[Rows, Tensor]]:
        """Norms and inner products of the matrices that this rank holds, those of one size together."""
        momentum, state = None, self.optimizer.state.get(param, {})
        for key in ("exp_avg", "momentum_buffer"):
            value = state.get(key)
            if isinstance(value, Tensor) and value.shape == param.shape:
                momentum = local(value).to(local(param).device)
                if is_code(momentum):
                    momentum = decode(momentum, local(state[f"{key}{SCALE}"]).to(momentum.device))
        grad = _local_gradient(param) if before.gradient is None else before.gradient
        grad = grad.to_dense() if grad is not None and grad.is_sparse else grad
        for rows in info.matrices.rows(param):
            w = rows.of(before.weight)
            change = rows.of(param.detach()) - w
            u = -change if intended is None else rows.of(intended)
            decayed = w
            if self.ours is not None and info.group["cautious"]:
                # an update that goes inward has the sign of the weight, with decay in it or without
                same = w.sign() * u.sign()
                decayed = torch.where(same > 0 if intended is None else same >= 0, w, 0)
            if intended is None and info.decay:
                u.sub_(decayed, alpha=info.decay)
            values = {"ww": norm(w), "dd": norm(change), "decayed": norm(decayed), "uu": norm(u), "wu": inner(w, u)}
            if intended is None:
                lost = values["uu"] <= ROUNDING * torch.finfo(w.dtype).eps * values["ww"]
                values |= {key: torch.where(lost, 0.0, values[key]) for key in ("uu", "wu")}
            if grad is not None:
                g = rows.of(grad)
                values |= {"gg": norm(g), "wg": inner(w, g)}
            if momentum is not None:
                m = rows.of(momentum)
                values |= {"mm": norm(m), "wm": inner(w, m), "ww_momentum": values["ww"]}
            zero = torch.zeros_like(values["ww"])
            yield rows, torch.stack([values.get(name, zero) for name in MEASURED[1:]])

    def _intended_update(self, info: ParameterInfo, param: Tensor, weight: Tensor, state: dict[str, Tensor]) -> Tensor:
        """The update of this rank's shard before rounding: what a second step moves float32 zeros by.

        A collective where the parameter is sharded: every rank computes all of it.
        """
        assert self.ours is not None
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
        view = ALGORITHMS[group["algorithm"]].view(group)
        batch = Batch(0, group, moved.device, moved.dtype, [moved], [item], view)
        ctx = StepContext(info.lr, 0.0, chunk_bytes(self.ours, moved.device))
        update_batch(batch, [item], ctx, is_decoded=True)
        moved.neg_()
        return local(put_state(param, moved, as_dtensor(param).placements)) if is_dtensor(param) else moved


def inner(x: Tensor, y: Tensor) -> Tensor:
    products: Tensor = torch.linalg.vecdot(x, y)
    return products


def norm(x: Tensor) -> Tensor:
    """Euclidean norms of the rows of a (rows, elements) tensor."""
    rows, elements = x.shape
    pieces = elements // LONGEST
    norms: Tensor
    if elements <= LONGEST or x.dtype == torch.float64:
        norms = torch.linalg.vector_norm(x, dim=1)
    elif elements % pieces == 0:
        norms = torch.linalg.vector_norm(torch.linalg.vector_norm(x.reshape(rows, pieces, -1), dim=2), dim=1)
    else:
        norms = inner(x, x).sqrt()  # slower, but its sums lose no digits
    return norms


def _local_gradient(param: Tensor) -> Tensor | None:
    """This rank's part of a gradient; None where only other ranks have one."""
    if param.grad is None or not is_dtensor(param):
        return param.grad
    return local_gradient("a parameter", param, param.grad)


def known_decay(optimizer: Optimizer, group: Group) -> float | None:
    """The fraction of a weight that a step of another optimizer takes away, or None where the group does not say.

    Known are groups without decay, torch's decoupled optimizers, and groups under `scale_weight_decay`.
    """
    lam, lr = group.get("weight_decay"), group.get("lr")
    if isinstance(lam, int | float) and lam == 0:
        return 0.0
    decoupled = isinstance(optimizer, _DECOUPLED) or group.get("decoupled_weight_decay") is True
    return None if lam is None or lr is None or not (decoupled or "base_weight_decay" in group) else float(lr * lam)


class Spectrum:
    """Measures spectral norms by a power iteration that starts where the last sample ended, and condition numbers.

    Start vectors come from a generator of its own, so that no random number of the training is used up.
    """

    def __init__(self, *, spectral_norm: bool, condition: bool, seed: int = 0) -> None:
        self.spectral_norm = spectral_norm
        self.condition = condition
        self._generator = torch.Generator().manual_seed(seed)
        self._vectors: dict[tuple[Tensor, int], Tensor] = {}

    def measure(self, param: Tensor, matrices: Matrices, weight: Tensor) -> dict[str, Tensor]:
        """The requested values of each matrix of a parameter, from a copy of its weight; brings shards together."""
        values: dict[str, Tensor] = {}
        if not (self.spectral_norm or self.condition):
            return values
        batches = matrices.batches(whole(weight))
        if batches and self.spectral_norm:
            values["spectral_norm"] = torch.cat([self._norms((param, n), batch) for n, batch in enumerate(batches)])
        if batches and self.condition:
            values["condition"] = condition_numbers(batches)
        return values

    def _norms(self, key: tuple[Tensor, int], batch: Tensor) -> Tensor:
        W = batch.to(wide_dtype(batch.dtype))
        shape = (W.shape[0], W.shape[2], min(BLOCK, *W.shape[1:]))
        V = self._vectors.get(key)
        iterations = WARM
        if V is None or V.shape != shape:  # other weights may have been put into the parameter
            iterations = COLD
            V = torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        V = V.to(W)
        for _ in range(iterations):
            V = torch.linalg.qr(W.mT @ (W @ V)).Q
        if V.isfinite().all():
            self._vectors[key] = V
        image = (W @ V).double()
        return _eigenvalues(image.mT @ image)[:, -1].clamp(min=0).sqrt()


def condition_numbers(batches: Iterable[Tensor]) -> Tensor:
    """Largest over smallest singular value of each matrix, up to about 1e7; beyond that they are not finite.

    From the eigenvalues of the smaller Gram matrix in float64, which costs an eigendecomposition.
    """
    numbers = []
    for batch in batches:
        W = batch.double()
        gram = W @ W.mT if W.shape[1] <= W.shape[2] else W.mT @ W
        eigenvalues = _eigenvalues(gram)
        noise = eigenvalues[:, -1] * gram.shape[-1] * torch.finfo(torch.float64).eps
        smallest = torch.where(eigenvalues[:, 0] > noise, eigenvalues[:, 0], 0.0)
        numbers.append((eigenvalues[:, -1] / smallest).sqrt())
    return torch.cat(numbers)


def _eigenvalues(gram: Tensor) -> Tensor:
    """Eigenvalues of symmetric matrices (count, n, n), ascending; not a number where torch would refuse a matrix."""
    finite = gram.isfinite().all(-1).all(-1, keepdim=True)
    values: Tensor = torch.linalg.eigvalsh(torch.where(finite.unsqueeze(-1), gram, 0.0))
    return torch.where(finite, values, torch.nan)
