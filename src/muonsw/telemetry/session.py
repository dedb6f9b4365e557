"""Telemetry: measure sampled steps of an optimizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from math import isfinite
from typing import Any, Self

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from muonsw import machine
from muonsw.addons.clipping import clipped_share
from muonsw.checkpoint import required_optimizer
from muonsw.distributed.shards import is_dtensor, local
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.options import require_whole
from muonsw.telemetry.observe import Observer
from muonsw.telemetry.record import Record, build, model_view
from muonsw.work import names_of

Sink = Callable[[Record], object]


class Telemetry:
    """Measures norms, update sizes, decay and alignments of an optimizer's weights at sampled steps.

    It uses torch's step hooks, so it works in any training loop and with any optimizer. Weights, gradients and random
    numbers are the same with and without it.

    Args:
        optimizer: any `torch.optim.Optimizer`; Accelerate's wrapper is removed.
        every: sample the first step and each step whose number is a multiple of it.
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
        if not any(group["params"] for group in optimizer.param_groups):
            raise ValueError(f"this {type(optimizer).__name__} has no parameters, so there is nothing to measure")
        for number, group in enumerate(optimizer.param_groups):
            for name, param in zip(names_of(group, number), group["params"], strict=True):
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
        for entry in self.sinks:
            if not callable(entry):
                raise TypeError(f"sink={entry!r} is not callable; pass a function of a record, or a list of them")
        self._records: deque[Record] = deque(maxlen=keep)
        self._observer = Observer(optimizer, model_view(model), spectral_norm=spectral_norm, condition=condition)
        self._sampling = self._unseen = False
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
        self._observer.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    @_disable_dynamo  # a compiled step calls its hooks uncompiled
    @torch.no_grad()
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._observer.stop()  # in case the last step raised
        is_capturing = machine.gpus() > 0 and torch.cuda.is_current_stream_capturing()
        self._unseen = is_capturing or _makes_state(optimizer)
        self._sampling = self.due and not self._unseen
        if self._sampling:  # hooks of our optimizers run after the closure, those of others before it
            closure = kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:])
            self._observer.begin(closure)

    @_disable_dynamo
    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        self.step += not self._unseen
        if not self._sampling:
            return
        self._sampling = False
        if isinstance(optimizer, ScaledDecayOptimizer):
            summary = optimizer.summary()
            record = build(self.step, self._observer.finish(summary), parameters=self.parameters)
            record |= {"matrices": summary.matrices, "groups": []}
            for values, group in zip(map(asdict, summary.groups), optimizer.param_groups, strict=True):
                diverged = [key for key, value in values.items() if isinstance(value, float) and not isfinite(value)]
                record["groups"].append({**values, **dict.fromkeys(diverged), "rounding": group["rounding"]})
            clipped = clipped_share(optimizer)
            if clipped is not None:
                record["clipped"] = clipped
        else:
            record = build(self.step, self._observer.finish(None), parameters=self.parameters)
        self._records.append(record)
        for sink in self.sinks:
            sink(record)
        if isinstance(optimizer, ScaledDecayOptimizer):
            optimizer._counters.warn_of_skips()


def _makes_state(optimizer: Optimizer) -> bool:
    # torch creates state for a checkpoint with a step at learning rates and gradients of zero
    if optimizer.state or any(group.get("lr") != 0 for group in optimizer.param_groups):
        return False
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    return all(param.grad is not None and not local(param.grad).any() for param in params)
