"""Measuring any torch optimizer: from the weights before and after a step, and from the settings in its groups."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from muonsw.matrices import STACK
from muonsw.slots import wide_dtype
from muonsw.telemetry.observe_ours import MOMENTUM_KEYS
from muonsw.telemetry.parameters import ModelView, matrix_view, members
from muonsw.telemetry.record import Measurements, Piece, inner, norm
from muonsw.work import Group

# torch optimizers that shrink weights by lr * weight_decay before they move them.
_DECOUPLED = (torch.optim.AdamW, torch.optim.Muon)


class AnyOptimizerObserver:
    """The observer of any torch optimizer; it copies the weights before a sampled step."""

    def __init__(self, optimizer: Optimizer, view: ModelView) -> None:
        self.optimizer = optimizer
        self.view = view
        self.measured = Measurements()
        self.skipped = 0
        self._before: dict[Tensor, Tensor] = {}
        self._gradients: dict[Tensor, dict[str, Tensor]] = {}

    def begin(self, closure: bool) -> None:
        """Copy the weights, and measure gradients now: some optimizers overwrite them.

        With a closure there are no gradients yet, so they are measured after the step.
        """
        self.measured = Measurements()
        self._before, self._gradients = {}, {}
        for group, _, _, param in members(self.optimizer):
            if param.numel() and (param.grad is not None or (closure and param.requires_grad)):
                self._before[param] = param.detach().clone()
                if not closure:
                    self._gradients[param] = self._gradient_rows(group, param)

    def stop(self) -> None:
        """Forget the copies."""
        self._before, self._gradients = {}, {}

    def finish(self) -> bool:
        """Measure what the step has done; say whether a GradScaler made a fused kernel skip it."""
        for group, _, _, param in members(self.optimizer):
            if param in self._before and param.grad is not None:
                self._measure(group, param)
        self.stop()
        found = getattr(self.optimizer, "found_inf", None)
        was_skipped = isinstance(found, Tensor) and bool(found)
        self.skipped += was_skipped
        return was_skipped

    def _measure(self, group: Group, param: Tensor) -> None:
        phi = known_decay(self.optimizer, group)
        old, dtype = self._before[param], wide_dtype(param.dtype)
        w = self._rows_of(group, param, old, dtype)
        rows = self._gradients.get(param) or self._gradient_rows(group, param)
        rows["weight"] = rows["decayed"] = norm(w)
        momentum = self._momentum(param)
        if momentum is not None:
            m = self._rows_of(group, param, momentum, dtype)
            rows |= {"momentum": norm(m), "weight_momentum": inner(w, m)}
        change = self._rows_of(group, param, param.detach(), dtype) - w
        rows["change"] = norm(change)
        u = change.neg_() if not isinstance(phi, Tensor) and not phi else change.neg_().sub_(w * phi)
        rows |= {"direction": norm(u), "weight_direction": inner(w, u)}
        self.measured.add(
            [Piece(param, range(w.shape[0]), w.shape[1], has_momentum=momentum is not None, phi=phi)], rows
        )

    def _gradient_rows(self, group: Group, param: Tensor) -> dict[str, Tensor]:
        grad = param.grad
        if grad is None:
            return {}
        dense = grad if grad.layout == torch.strided else grad.to_dense()
        dtype = wide_dtype(param.dtype)
        w, g = (self._rows_of(group, param, t, dtype) for t in (self._before[param], dense))
        return {"gradient": norm(g), "weight_gradient": inner(w, g)}

    def _rows_of(self, group: Group, param: Tensor, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor as (experts, entries) where the parameter is a stack of matrices, else as one row."""
        stacked = matrix_view(group, param, self.view) == STACK
        return tensor.reshape(-1, param.shape[-2] * param.shape[-1] if stacked else param.numel()).to(dtype)

    def _momentum(self, param: Tensor) -> Tensor | None:
        state = self.optimizer.state.get(param, {})
        found = (state.get(key) for key in MOMENTUM_KEYS)
        return next((m for m in found if isinstance(m, Tensor) and m.shape == param.shape), None)


def known_decay(optimizer: Optimizer, group: Group) -> float | Tensor | None:
    """The fraction of a weight that this group's step takes away, or None where the group does not say.

    Known are groups without decay, torch's decoupled optimizers, and groups under `scale_weight_decay`.
    """
    lam, lr = group.get("weight_decay"), group.get("lr")
    if isinstance(lam, int | float) and lam == 0:
        return 0.0
    decoupled = isinstance(optimizer, _DECOUPLED) or group.get("decoupled_weight_decay") is True
    if lam is None or lr is None or not (decoupled or "base_weight_decay" in group):
        return None
    phi: float | Tensor = lr * lam
    return phi
