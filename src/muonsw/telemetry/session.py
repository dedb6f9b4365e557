"""Telemetry: attach it to an optimizer, and it measures every so many of its updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Self

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from muonsw import machine
from muonsw.addons.clipping import clipped_share
from muonsw.checkpoint import required_optimizer
from muonsw.distributed.shards import is_dtensor, local, whole
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.telemetry.observe import Observer
from muonsw.telemetry.parameters import matrices, members, model_view, parameter_infos
from muonsw.telemetry.record import Record, build
from muonsw.telemetry.spectrum import Spectra, SpectralNorms, condition_numbers

Sink = Callable[[Record], object]


class Telemetry:
    """Measures what an optimizer does to the weights: norms, update sizes, decay, alignments, at sampled updates.

    It attaches to the optimizer's step hooks and works in any training loop, with our optimizers and with others.
    Weights, gradients and random numbers are the same with and without it.

    Args:
        optimizer: any `torch.optim.Optimizer`; one that Accelerate has wrapped is unwrapped.
        every: sample the updates whose number is a multiple of it, and the first one.
        model: gives names, roles and layers to parameters whose groups have none.
        sink: a function that is called with each record, or several of them.
        parameters: include the values of every single parameter in the records.
        spectral_norm: measure the largest singular value of every matrix as well, by power iteration.
        condition: estimate the condition number of every matrix as well; expensive.
        start_step: updates that were completed before, in a run that is resumed.
        keep: how many of the latest records stay readable in `records`; None keeps them all.
        seed: of the start vectors of the power iteration.

    Attributes:
        step: completed updates, skipped ones included. Add to it for updates that no hook sees, such as replays
            of a CUDA graph.

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
        seed: int = 0,
    ) -> None:
        _require_whole("every", every, 1)
        _require_whole("start_step", start_step, 0)
        if keep is not None:
            _require_whole("keep", keep, 1)
        optimizer = required_optimizer(optimizer, "Telemetry")
        _check_optimizer(optimizer)
        self.optimizer = optimizer
        self.every = every
        self.step = start_step
        self.parameters = parameters
        self.sinks = _as_sinks(sink)
        self._records: deque[Record] = deque(maxlen=keep)
        self._view = model_view(model)
        self._observer = Observer(optimizer, self._view)
        self._norms = SpectralNorms(seed=seed) if spectral_norm else None
        self._condition = condition
        self._spectra: Spectra = {}
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
        """Whether the next update will be sampled."""
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

    @_disable_dynamo  # a compiled step calls hooks as they are, and its own graphs stay the same
    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._observer.stop()  # a step that raised an error has left it on
        self._unseen = _capturing() or _makes_state(optimizer)
        self._sampling = self.due and not self._unseen
        if self._sampling:
            closure = kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:])
            self._spectra = self._measure_spectra(optimizer, closure)
            with torch.no_grad():
                self._observer.begin(closure)

    @_disable_dynamo
    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG002
        if not self._sampling:
            self.step += not self._unseen
            return
        self.step += 1
        self._sampling = False
        summary = optimizer.summary() if isinstance(optimizer, ScaledDecayOptimizer) else None
        with torch.no_grad():
            sample = self._observer.finish(summary)
            infos = parameter_infos(optimizer, self._view)
            record = build(self.step, sample, infos, self._spectra, parameters=self.parameters)
        if isinstance(optimizer, ScaledDecayOptimizer) and summary is not None:
            roundings = [group["rounding"] for group in optimizer.param_groups]
            groups = [asdict(group) | {"rounding": own} for group, own in zip(summary.groups, roundings, strict=True)]
            record |= {"matrices": summary.matrices, "groups": groups}
            clipped = clipped_share(optimizer)
            record |= {} if clipped is None else {"clipped": clipped}
        self._records.append(record)
        for sink in self.sinks:
            sink(record)
        if isinstance(optimizer, ScaledDecayOptimizer):
            optimizer._counters.warn_of_skips()

    @torch.no_grad()
    def _measure_spectra(self, optimizer: Optimizer, closure: bool) -> Spectra:
        """Singular values of the weights before the update, where they were asked for."""
        spectra: Spectra = {}
        if self._norms is None and not self._condition:
            return spectra
        infos = parameter_infos(optimizer, self._view)
        for group, _, _, param in members(optimizer):
            sharded = is_dtensor(param)  # brought together on all ranks, also where one of them lacks a gradient
            batches = matrices(group, whole(param), infos[param].matrix)
            if not batches or not (closure or sharded or param.grad is not None):
                continue
            if self._norms is not None:
                spectra.setdefault("spectral_norm", {})[param] = self._norms.measure(param, batches)
            if self._condition:
                spectra.setdefault("condition", {})[param] = condition_numbers(batches)
        return spectra


def _capturing() -> bool:
    """Whether a CUDA graph is being recorded, which is not an update."""
    return machine.gpus() > 0 and torch.cuda.is_current_stream_capturing()


def _makes_state(optimizer: Optimizer) -> bool:
    """Whether this is the step at learning rates and gradients of zero by which torch makes state for a checkpoint."""
    if optimizer.state or any(group.get("lr") != 0 for group in optimizer.param_groups):
        return False
    gradients = [param.grad for _, _, _, param in members(optimizer) if param.requires_grad]
    return all(grad is not None and not local(grad).any() for grad in gradients)


def _as_sinks(sink: Sink | Iterable[Sink] | None) -> list[Sink]:
    if sink is None:
        return []
    sinks = [sink] if callable(sink) else list(sink)
    for entry in sinks:
        if not callable(entry):
            raise TypeError(f"sink={entry!r} cannot be called; pass a function that takes a record, or several")
    return sinks


def _require_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r}: must be a whole number, at least {least}")


def _check_optimizer(optimizer: Optimizer) -> None:
    """Refuse what cannot be measured, before anything is attached."""
    params = [(name or words, param) for _, name, words, param in members(optimizer)]
    if not params:
        raise ValueError(f"this {type(optimizer).__name__} has no parameters, so there is nothing to measure")
    for name, param in params:
        if is_dtensor(param) and not isinstance(optimizer, ScaledDecayOptimizer):
            raise ValueError(
                f"{name} is sharded (a DTensor), which can be measured with optimizers of this library only"
            )
        if not param.is_floating_point():
            raise ValueError(f"{name} has dtype {param.dtype}; only real floating-point parameters can be measured")
    for hook in optimizer._optimizer_step_pre_hooks.values():
        if isinstance(getattr(hook, "__self__", None), Telemetry):
            raise ValueError("this optimizer has a Telemetry already; call its detach() first, or give it more sinks")
