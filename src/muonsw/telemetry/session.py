"""Telemetry: measure sampled steps of an optimizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from math import isfinite
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from muonsw import machine
from muonsw.addons.clipping import clipped_share
from muonsw.addons.norm_rules import FREE
from muonsw.checkpoint import required_optimizer
from muonsw.distributed.shards import is_dtensor, local
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.options import require_whole
from muonsw.routing import classify
from muonsw.telemetry import observe
from muonsw.telemetry.sinks import Record
from muonsw.work import named_params

Sink = Callable[[Record], object]

_ANNOUNCEMENT = (
    "telemetry that measures this step (attach it on every rank, with the same `every` and `start_step`, and give the "
    "sink to one of them)"
)


class Telemetry:
    """Measures norms, update sizes, decay and alignments of an optimizer's weights at sampled steps.

    It uses torch's step hooks, so it works in any training loop and with any optimizer. Weights, gradients and random
    numbers are the same with and without it.

    Args:
        optimizer: any `torch.optim.Optimizer`, or Accelerate's wrapper around one.
        every: sample step 1 and every multiple of this number.
        model: provides names, roles and layers for parameters whose groups have none.
        sink: a function that is called with each record, or several of them.
        parameters: include the values of each parameter in the records.
        spectral_norm: also measure the largest singular value of every matrix, by power iteration.
        condition: also estimate the condition number of every matrix; expensive.
        start_step: completed steps of a resumed run.
        keep: how many of the latest records to keep in `records`; None keeps all.

    Attributes:
        step: completed steps, including skipped ones. Add to it for steps that no hook sees, such as replays of a
            CUDA graph.

    Examples:
        >>> import torch
        >>> from muonsw import MuonSW, Telemetry
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8), torch.nn.Linear(8, 8))
        >>> optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.1)
        >>> telemetry = Telemetry(optimizer, every=2)
        >>> for _ in range(4):
        ...     model(torch.ones(2, 8)).square().mean().backward()
        ...     optimizer.step(); optimizer.zero_grad()
        >>> [record["step"] for record in telemetry.records]
        [1, 2, 4]
        >>> round(telemetry.last["roles"]["hidden"]["decay"], 6)
        0.002
    """

    def __init__(
        self,
        optimizer: Optimizer,
        every: int = 50,
        *,
        model: nn.Module | None = None,
        sink: Sink | Iterable[Sink] | None = None,
        parameters: bool = True,
        spectral_norm: bool = False,
        condition: bool = False,
        start_step: int = 0,
        keep: int | None = 200,
    ) -> None:
        require_whole("every", every, 1)
        require_whole("start_step", start_step, 0)
        if keep is not None:
            require_whole("keep", keep, 1)
        optimizer = required_optimizer(optimizer, "Telemetry")
        for number, group in enumerate(optimizer.param_groups):
            for name, param in named_params(group, number):
                if is_dtensor(param) and not isinstance(optimizer, ScaledDecayOptimizer):
                    raise ValueError(f"{name} is a DTensor, which is measured only with optimizers of this library")
                if not param.is_floating_point():
                    raise ValueError(
                        f"{name} has dtype {param.dtype}; only real floating-point weights can be measured"
                    )
        for hook in optimizer._optimizer_step_pre_hooks.values():
            if isinstance(getattr(hook, "__self__", None), Telemetry):
                raise ValueError("this optimizer has a Telemetry already; call its detach(), or pass it several sinks")
        self.optimizer = optimizer
        self.every = every
        self.step = start_step
        self.parameters = parameters
        self.sinks: list[Sink] = [sink] if callable(sink) else list(sink or ())
        if not all(map(callable, self.sinks)):
            raise TypeError(f"sink={sink!r} is not callable; pass a function such as JsonlSink(path), or a list")
        self._ours = optimizer if isinstance(optimizer, ScaledDecayOptimizer) else None
        # Our optimizers count skipped steps themselves; subtract those from before telemetry was attached.
        self._skipped = 0 if self._ours is None else -self._ours.skipped_steps
        self._routed = {} if model is None else {entry.param: entry for entry in classify(model)}
        spectra = {"spectral_norm": spectral_norm, "condition": condition}
        self._spectra = [name for name, enabled in spectra.items() if enabled]
        self._records: deque[Record] = deque(maxlen=keep)
        self._before: dict[Tensor, observe.Before] | None = None  # the weights before a step that is sampled
        self._unseen = False
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    @property
    def records(self) -> list[Record]:
        """The latest records, oldest first."""
        return list(self._records)

    @property
    def last(self) -> Record | None:
        """The latest record, or None before the first."""
        return self._records[-1] if self._records else None

    @property
    def due(self) -> bool:
        """Whether the next step will be sampled."""
        return self.step == 0 or (self.step + 1) % self.every == 0

    def detach(self) -> None:
        """Stop measuring; records stay readable."""
        for handle in self._handles:
            handle.remove()
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def _stop(self) -> None:
        self._before = None
        if self._ours is not None and _ANNOUNCEMENT in self._ours._ranks.announced:
            self._ours._ranks.announced.remove(_ANNOUNCEMENT)

    @_disable_dynamo  # a compiled step calls its hooks uncompiled
    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stop()  # in case the last step raised
        is_capturing = machine.gpus() > 0 and torch.cuda.is_current_stream_capturing()
        self._unseen = is_capturing or _makes_state(optimizer)
        if self.due and not self._unseen:
            # hooks of our optimizers run after the closure, those of others before it
            closure = kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:])
            self._before = observe.copies(optimizer, closure=closure)
            if self._ours is not None and any(map(is_dtensor, self._before)):
                self._ours._ranks.announced.append(_ANNOUNCEMENT)

    @_disable_dynamo
    @torch.no_grad()
    def _after_step(self, *_: object) -> None:
        self.step += not self._unseen
        if self._before is None:
            return
        record = self._record(self._before)
        self._stop()
        self._records.append(record)
        for sink in self.sinks:
            sink(record)
        if self._ours is not None:
            self._ours._counters.warn_of_skips()

    def _record(self, before: dict[Tensor, observe.Before]) -> Record:
        optimizer, ours = self.optimizer, self._ours
        if ours is not None:
            summary = ours.summary()
            was_skipped, skipped = summary.skipped, self._skipped + summary.skipped_steps
            stepped = {param for _, params, _ in ours._last for param in params}
            # under a norm rule the decay factor differs between weights
            phis = [group.decay if group.norm == FREE else None for group in summary.groups]
        else:
            found_inf = getattr(optimizer, "found_inf", None)  # with a GradScaler fused kernels may skip
            was_skipped = isinstance(found_inf, Tensor) and bool(found_inf)
            skipped = self._skipped = self._skipped + was_skipped
            stepped = {param for param in before if param.grad is not None}
            phis = [observe.known_decay(optimizer, group) for group in optimizer.param_groups]
        moved = {param: copied for param, copied in before.items() if param in stepped}
        values = observe.describe_step(
            optimizer, self._routed, moved, phis, self._spectra, was_skipped=was_skipped, parameters=self.parameters
        )
        record: Record = {"kind": "telemetry", "step": self.step, **values}
        record |= {"skipped": skipped, "was_skipped": was_skipped}
        if ours is not None:
            record |= {"matrices": summary.matrices, "groups": []}
            for entry in map(asdict, summary.groups):
                diverged = [key for key, value in entry.items() if isinstance(value, float) and not isfinite(value)]
                record["groups"].append(entry | dict.fromkeys(diverged))
            if (clipped := clipped_share(ours)) is not None:
                record["clipped"] = clipped
        return record


def _makes_state(optimizer: Optimizer) -> bool:
    # to create state for a checkpoint, torch takes a step with learning rates and gradients of zero
    if optimizer.state or any(group.get("lr") != 0 for group in optimizer.param_groups):
        return False
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    return all(param.grad is not None and not local(param.grad).any() for param in params)
