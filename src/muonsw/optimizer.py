"""The one optimizer underneath: groups, state, peaks and the step. Algorithms and decay rules are named parts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Self, overload

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from muonsw import loading, peak
from muonsw.algorithms import ALGORITHMS, Budget, Item
from muonsw.apply import Coefficients, Observer, apply_update
from muonsw.decay import DECAY_RULES, decay_factor
from muonsw.nonfinite import POLICIES, finite_flag, raise_if_not_finite
from muonsw.options import (
    BOOKKEEPING,
    COMMON,
    algorithm_defaults,
    refuse_options_of_others,
    refuse_parameter,
    validate_option,
)
from muonsw.peak import Group, PeakLRError
from muonsw.precision import LOW_PRECISION
from muonsw.route import route, routing_table
from muonsw.state import ensure_state
from muonsw.work import Work, work_of

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]

CPU_CHUNK_BYTES = 4 * 2**20
ACCELERATOR_CHUNK_BYTES = 9 * 2**26


class ScaledDecayOptimizer(Optimizer):
    """A torch optimizer in which each param group names its algorithm and its decay rule.

    Use it through `MuonSW`, `AdamWSW` or `SGDSW`, which differ in their default algorithm only.
    """

    algorithm: ClassVar[str]
    _skipped_on_host: int
    _skipped_on_device: Tensor
    _excess: Tensor
    _observer: Observer | None

    def __init__(self, params: Params, options: Group, *, nonfinite: str, chunk_bytes: int | None) -> None:
        if nonfinite not in POLICIES:
            raise ValueError(f"nonfinite={nonfinite!r}: must be one of {', '.join(map(repr, POLICIES))}")
        if chunk_bytes is not None and chunk_bytes < 1:
            raise ValueError(f"chunk_bytes={chunk_bytes}: must be at least 1, or None for the default")
        self.nonfinite = nonfinite
        self.chunk_bytes = chunk_bytes
        self._reset_flags()
        checked = {key: validate_option(key, value) for key, value in options.items()}
        refuse_options_of_others(checked, self.algorithm)
        super().__init__(params, {**algorithm_defaults(self.algorithm), **BOOKKEEPING, **checked})

    @classmethod
    def for_model(
        cls,
        model: torch.nn.Module,
        lr: float | Tensor,
        weight_decay: float | Tensor = 0.1,
        *,
        patterns: dict[str, Group] | None = None,
        adamw: Group | None = None,
        **options: Any,
    ) -> Self:
        """Build one optimizer for a whole model, each parameter in the group that its role asks for.

        Hidden matrices, convolutions and stacked experts get this class's algorithm with decay. Embeddings,
        heads, routers, norms, biases and other vectors get no decay, and AdamW where this class is Muon.

        Args:
            model: the model; frozen parameters are left out, tied ones are seen once.
            lr: learning rate of every group that has none of its own.
            weight_decay: lambda of the decayed groups.
            patterns: options for parameters by name (`"layers.*.attn.qkv.weight"`, shell wildcards) or by role
                (`"role:embedding"`). The first match wins; one that matches nothing is an error.
            adamw: options for everything that is routed to AdamW, such as a learning rate of its own.
            **options: options of the class, for all groups.

        Examples:
            >>> import torch
            >>> from muonsw import MuonSW
            >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 16))
            >>> optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.1)
            >>> [(g["role"], g["algorithm"], g["weight_decay"]) for g in optimizer.param_groups]
            [('embedding', 'adamw', 0.0), ('hidden', 'muon', 0.1), ('bias', 'adamw', 0.0)]
        """
        groups = route(model, cls.algorithm, patterns=patterns or {}, adamw=adamw or {})
        return cls(groups, lr=lr, weight_decay=weight_decay, **options)  # type: ignore[call-arg]

    def routing(self) -> str:
        """A table of which parameters are in which group, to print."""
        return routing_table(self.param_groups)

    def add_param_group(self, param_group: Group) -> None:
        """Add parameters with options of their own; what they leave open comes from the constructor."""
        group = self._complete(dict(param_group))
        super().add_param_group(group)
        try:
            for name, param in zip(_names(group, len(self.param_groups) - 1), group["params"], strict=True):
                refuse_parameter(name, param)
                ALGORITHMS[group["algorithm"]].validate(group, name, param)
        except ValueError:
            self.param_groups.pop()
            raise
        self._place_lr(group)
        if group["rounding"] == "nearest" and any(p.dtype in LOW_PRECISION for p in group["params"]):
            warnings.warn(
                "rounding='nearest' loses decay and small updates of low-precision weights; "
                "use 'stochastic' or 'kahan'",
                stacklevel=2,
            )

    def _complete(self, group: Group) -> Group:
        """Validate a group's options and fill in the rest.

        Options that mean the same everywhere come from the constructor; those of an algorithm only where the
        group uses the constructor's algorithm, else from that algorithm's own defaults.
        """
        for key in group.keys() - {"params", "param_names"}:
            group[key] = validate_option(key, group[key])
        algorithm = group.get("algorithm", self.defaults["algorithm"])
        inherited = self.defaults if algorithm == self.defaults["algorithm"] else algorithm_defaults(algorithm)
        common = {key: self.defaults[key] for key in COMMON}
        completed: Group = {**inherited, **common, **BOOKKEEPING, **group}
        if "lr" not in group and completed["lr_multiplier"] != 1:
            completed["lr"] = completed["lr"] * completed["lr_multiplier"]
        if completed["peak_lr"] == peak.RUNNING_MAX and (
            completed["capturable"] or isinstance(completed["lr"], Tensor)
        ):
            raise ValueError("peak_lr='running_max' needs a learning rate that the host knows, not a tensor")
        if completed["constructor_lr"] is None:
            completed["constructor_lr"] = float(completed["lr"])
        return completed

    def _place_lr(self, group: Group) -> None:
        """A capturable group's learning rate is a scalar on its device, which schedulers fill in place."""
        if group["capturable"] and group["params"] and not isinstance(group["lr"], Tensor):
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step; nothing is changed when it raises an error."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = work_of(self)
        self._update_peaks(work[0][1][0].param.device if work else None)
        if self._observer is None:
            self._update(work)
        else:
            self._update_uncompiled(work)
        return loss

    def _update(self, work: Work) -> None:
        ok = self._finite([item for _, batch in work for item in batch])
        if ok is False:
            self._skipped_on_host += 1
            return
        flag = ok if isinstance(ok, Tensor) else None
        coefficients = [self._coefficients(group, batch[0].param.device, flag) for group, batch in work]
        for (group, batch), factors in zip(work, coefficients, strict=True):
            self._step_group(group, batch, factors)

    @_disable_dynamo  # torch.compiler.disable would import the compiler at once
    def _update_uncompiled(self, work: Work) -> None:
        """An update that is measured runs as it is written, whatever the step was compiled to."""
        self._update(work)

    def _step_group(self, group: Group, items: list[Item], coefficients: Coefficients) -> None:
        ensure_state(group, items)
        counters = [item.state["step"] for item in items if "step" in item.state]
        if counters:
            taken = 1 if coefficients.ok is None else [coefficients.ok.float()] * len(counters)
            torch._foreach_add_(counters, taken)
        budget = Budget(self._chunk_bytes(items[0].param.device), coefficients.ok, coefficients.on_host)
        apply = apply_update if self._observer is None else self._observer.apply
        for update in ALGORITHMS[group["algorithm"]].updates(group, items, budget):
            apply(group, update, coefficients)
            del update  # its directions need not outlive it

    def _finite(self, items: list[Item]) -> Tensor | bool:
        if self.nonfinite == "propagate" or not items:
            return True
        ok = finite_flag(items)
        if self.nonfinite == "raise":
            if not bool(ok):
                raise_if_not_finite(items)
            return True
        if isinstance(ok, Tensor):
            self._skipped_on_device.add_(~ok)
        return ok

    @_disable_dynamo
    def _update_peaks(self, device: torch.device | None) -> None:
        """Resolve peaks and check learning rates, on the host and before anything changes."""
        if device is not None:
            self._skipped_on_device, self._excess = self._skipped_on_device.to(device), self._excess.to(device)
        for number, group in enumerate(self.param_groups):
            lr = group["lr"]
            if isinstance(lr, Tensor):
                if group["resolved_peak_lr"] is None and not _capturing(lr):
                    peak.update_peak(group, self._label(number))
                continue
            if any(p.is_cuda and _capturing(p) for p in group["params"][:1]):
                raise RuntimeError(
                    f"a CUDA graph would freeze the learning rate {lr:g} of {self._label(number)}; "
                    f"pass capturable=True or a tensor lr"
                )
            peak.update_peak(group, self._label(number))
            if _decay_needs_peak(group):
                peak.check_lr(group, self._label(number))

    def _coefficients(self, group: Group, device: torch.device, ok: Tensor | None) -> Coefficients:
        """Learning rate and decay of a group; with a tensor learning rate nothing is read back from the device."""
        eta, lam, top = group["lr"], group["weight_decay"], peak.eta_max(group)
        eta, lam = (x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in (eta, lam))
        phi = decay_factor(group["decay"], lam, eta, top)
        if isinstance(phi, Tensor):
            self._flag_excess(group, eta, phi)
        elif phi > 1:
            raise ValueError(f"decay would take {phi:g} times the weight in one step; lower lr or weight_decay")
        if ok is None:
            return Coefficients(eta, phi)
        here = ok.to(device, non_blocking=True)
        return Coefficients(here * eta, here * phi, here)

    def _flag_excess(self, group: Group, eta: float | Tensor, phi: Tensor) -> None:
        """Remember on the device that a learning rate or a decay was too large; `check` reads it."""
        excess = phi > 1
        if _decay_needs_peak(group) and group["resolved_peak_lr"] is not None:
            excess = excess | (eta > group["resolved_peak_lr"] * (1 + peak.PEAK_TOLERANCE))
        self._excess.logical_or_(excess.to(self._excess.device, non_blocking=True))

    def check(self) -> None:
        """Raise if a learning rate held in a tensor has exceeded its peak since the last check.

        It waits for the device, so a training loop calls it now and then; `state_dict` calls it too.
        """
        excess = bool(self._excess)
        self._excess.zero_()  # in place: a captured graph writes to this very tensor
        if excess:
            raise PeakLRError(
                "a tensor learning rate exceeded its peak, or a decay factor exceeded 1, in an earlier step; pass "
                "peak_lr=<the highest learning rate of the run>, or call set_peak_lr(scheduler) before training"
            )

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped for gradients that were not finite; waits for the device. Not saved."""
        return self._skipped_on_host + int(self._skipped_on_device)

    def set_peak_lr(self, peak_lr: Any, *, group: int | None = None, total_steps: int | None = None) -> None:
        """Set eta_max: a number, None or "running_max" for all groups (or one), or from a scheduler object.

        Args:
            peak_lr: the highest learning rate of the run, or a torch scheduler that knows it. A scheduler is not
                asked about groups that have a number of their own.
            group: the number of the only group to change.
            total_steps: length of the run, to find the top of a LambdaLR.
        """
        chosen = range(len(self.param_groups)) if group is None else [group]
        if hasattr(peak_lr, "step") and hasattr(peak_lr, "optimizer"):
            found = peak.scheduler_peaks(peak_lr, total_steps)
            for number in chosen:
                if self.param_groups[number]["peak_lr"] is None:
                    peak.set_resolved_peak(self.param_groups[number], found[number])
            return
        setting = validate_option("peak_lr", peak_lr)
        for number in chosen:
            self.param_groups[number]["peak_lr"] = setting
            known = setting if isinstance(setting, float) else None
            peak.set_resolved_peak(self.param_groups[number], known)  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """State and param groups, peaks included, as plain data that loads with `weights_only=True`."""
        self.check()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of torch's Muon, AdamW or SGD, and go on from there.

        The saved peak learning rate wins over this optimizer's own, with a warning where they differ.
        """
        expected = [peak.expected_peak(group) for group in self.param_groups]
        with loading.through_hooks(self):
            super().load_state_dict(state_dict)
        for number, group in enumerate(self.param_groups):
            peak.warn_after_load(expected[number], group, self._label(number), _decay_needs_peak(group))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "nonfinite": self.nonfinite, "chunk_bytes": self.chunk_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_excess" not in self.__dict__:
            self._reset_flags()

    def __repr__(self) -> str:
        return f"{type(self).__name__}\n{self.routing()}"

    def _patch_step_function(self) -> None:
        """Leave `step` alone, which torch would wrap again in every subclass.

        Its hooks run inside it, so they run once also where a subclass overrides it and calls it.
        """
        self._zero_grad_profile_name = f"Optimizer.zero_grad#{type(self).__name__}.zero_grad"

    def _reset_flags(self) -> None:
        self._skipped_on_host = 0
        self._skipped_on_device = torch.zeros((), dtype=torch.int64)
        self._excess = torch.zeros((), dtype=torch.bool)
        self._observer = None

    def _chunk_bytes(self, device: torch.device) -> int:
        return self.chunk_bytes or (CPU_CHUNK_BYTES if device.type == "cpu" else ACCELERATOR_CHUNK_BYTES)

    def _label(self, number: int) -> str:
        role = self.param_groups[number]["role"]
        return f"param group {number}" + (f" ({role})" if role else "")


def _names(group: Group, number: int) -> list[str]:
    names = group.get("param_names")
    return list(names) if names else [f"parameter {i} of group {number}" for i in range(len(group["params"]))]


def _capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _decay_needs_peak(group: Group) -> bool:
    lam = group["weight_decay"]
    return DECAY_RULES[group["decay"]].uses_peak and (isinstance(lam, Tensor) or lam != 0)
