"""The engine of all optimizers: param groups, state, peaks, the step, and the summary of what it did."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from muonsw import checkpoint, peak
from muonsw.addons import gradient_norm, norm_rules
from muonsw.addons.replay import Replay
from muonsw.algorithms import ALGORITHMS
from muonsw.codecs import refuse_shards, wait_for_host
from muonsw.decay import decays, needs_peak, phi_of, require_length
from muonsw.distributed.ranks import Ranks
from muonsw.nonfinite import Counters, Flag
from muonsw.options import (
    SETTINGS,
    complete_group,
    constructor_defaults,
    options_of,
    prune,
    refuse_options_of_others,
    refuse_parameter,
    require_model,
    validate_option,
)
from muonsw.presets import PRESETS
from muonsw.routing import reasons_table, route, routing_table
from muonsw.state import state_bytes
from muonsw.step import take_step
from muonsw.text import counted, sized, text_table
from muonsw.work import Group, named_params

Params = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class ScaledDecayOptimizer(Optimizer):
    """A torch optimizer in which each param group names its algorithm and its decay rule.

    Use it through `MuonSW`, `AdamWSW` or `SGDSW`, which differ only in their default algorithm.
    """

    algorithm: ClassVar[str]
    nonfinite: str
    chunk_bytes: int | None
    replay: bool | None

    def __init__(self, params: Params, arguments: Group) -> None:
        if isinstance(params, torch.nn.Module):
            name = type(self).__name__
            raise TypeError(
                f"{name} takes parameters, not a model; call {name}.for_model(model, lr=...), which picks an "
                f"algorithm for each parameter"
            )
        options = {k: v for k, v in arguments.items() if k not in ("self", "params", "options", "__class__")}
        self._reset()
        self._ranks = Ranks(options.pop("process_group", None))
        vars(self).update({key: validate_option(key, options.pop(key)) for key in SETTINGS})
        super().__init__(params, constructor_defaults(options, self.algorithm))

    @classmethod
    def for_model(
        cls,
        model: torch.nn.Module,
        lr: float | Tensor,
        weight_decay: float | Tensor = 0.1,
        *,
        preset: str | None = None,
        patterns: dict[str, Group] | None = None,
        adamw: Group | None = None,
        **options: Any,
    ) -> Self:
        """Build one optimizer for a whole model, with param groups by the role of each parameter.

        The first groups hold hidden matrices, convolutions and experts, with this class's algorithm and decay.
        Embeddings, heads, routers, norms, biases, other vectors, low-rank factors of adapters and anything unclear
        get no decay, and AdamW if this class is Muon. `routing(reasons=True)` explains each choice.

        Args:
            model: the model; frozen parameters are left out, tied ones are included once.
            lr: learning rate of every group that does not set one.
            weight_decay: lambda of the decayed groups.
            preset: a name from `PRESETS` ("normuon", "soap", ...), with the options of a method's authors; options that
                you pass override it.
            patterns: options for parameters by name (`"layers.*.attn.qkv.weight"`, shell wildcards, without the
                prefixes that torch.compile and other wrappers add) or by role (`"role:embedding"`). The first match
                wins; a pattern that matches nothing is an error.
            adamw: options of the AdamW groups, such as their learning rate.
            **options: options of the class, for all groups. `algorithm` replaces the class's default ("soap", "lion",
                ...) and may be followed by options of that algorithm.

        Examples:
            >>> import torch
            >>> from muonsw import MuonSW
            >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 10))
            >>> optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.1)
            >>> [(g["role"], g["algorithm"], g["weight_decay"]) for g in optimizer.param_groups]
            [('hidden', 'muon', 0.1), ('embedding', 'adamw', 0.0), ('bias', 'adamw', 0.0), ('head', 'adamw', 0.0)]
        """
        require_model(model, f"{cls.__name__}.for_model")
        known = {} if preset is None else PRESETS[str(preset)]
        options = {**known, **options}
        algorithm = validate_option("algorithm", options.pop("algorithm", cls.algorithm))
        if algorithm != known.get("algorithm", algorithm):
            raise ValueError(
                f"preset={preset!r} uses algorithm={known['algorithm']!r}; leave out the preset or "
                f"algorithm={algorithm!r}"
            )
        groups, reasons = route(model, algorithm, patterns=patterns or {}, adamw=adamw or {})
        if algorithm != cls.algorithm:
            # The constructor accepts only the options of the class's algorithm, so these go into the groups.
            refuse_options_of_others(options, algorithm)
            extra = {key: options.pop(key) for key in options_of(algorithm) if key in options}
            groups = [{**extra, **group} if group["algorithm"] == algorithm else group for group in groups]
        options |= {"lr": lr, "weight_decay": weight_decay}
        optimizer = cls(groups, **options)
        optimizer._reasons = reasons
        for name in [name for name, param in model.named_parameters() if not param.requires_grad]:
            path, _, key = name.rpartition(".")
            optimizer._left_out.append((name, weakref.ref(model.get_submodule(path)), key))
        return optimizer

    def routing(self, *, reasons: bool = False) -> str:
        """A printable table of the param groups, and the memory of their state on this rank.

        Args:
            reasons: one line per parameter instead, with the matrices that Muon sees in it and the reason for its role.
        """
        if reasons:
            return reasons_table(self.param_groups, self._reasons)
        return f"{routing_table(self.param_groups)}\n{state_line(state_bytes(self.param_groups))}"

    def add_param_group(self, param_group: Group) -> None:
        """Add a param group; options that it does not set come from the constructor.

        In the middle of a run, set the group's `peak_lr` unless its learning rate is at its peak.
        """
        group, number = complete_group(dict(param_group), self.defaults), len(self.param_groups)
        if decays(group):
            require_length(group["decay"], group.get("total_steps"))
        if not group["step_count"]:  # a new group joins at the step of the others
            group["step_count"] = max((int(other["step_count"]) for other in self.param_groups), default=0)
        if group["step_count"] and group["highest_lr"] is None:  # the run may be past the peak
            group["highest_lr"] = peak.expected_peak(group)
        super().add_param_group(group)
        prune(group)
        try:
            self._attach_addons()
            setting = self.defaults["peak_lr"]
            peak.refuse_shared(setting, [g for g in self.param_groups if g["peak_lr"] == setting and needs_peak(g)])
            algorithm = ALGORITHMS[group["algorithm"]]
            if group["offload"] and algorithm.matrices is not None and self._ranks.process_group is not None:
                raise ValueError(
                    "offload=True keeps momenta on the host, and process_group= sends them between GPUs; leave one out"
                )
            for name, param in named_params(group, number):
                refuse_parameter(name, param)
                algorithm.validate(group, name, param)
                refuse_shards(name, group, param)
        except BaseException:
            self.param_groups.pop()
            raise

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step, as `muonsw.step` describes; invalid input raises before anything changes.

        Step hooks run after the closure, when there are gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    _step = Optimizer.profile_hook_step(take_step)

    def warn_of_unfrozen(self) -> None:
        """Warn of parameters that were unfrozen after the optimizer was built and are in no group."""
        params = [(name, getattr(module(), key, None)) for name, module, key in self._left_out]
        unfrozen = [(name, param) for name, param in params if param is not None and param.requires_grad]
        trained = {id(param) for group in self.param_groups for param in group["params"]} if unfrozen else set()
        names = [name for name, param in unfrozen if id(param) not in trained]
        if names:
            self._counters.warn_once(
                "unfrozen",
                f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''} required no gradient when this "
                f"optimizer was built and are in no param group, so they are not trained. Build the optimizer after "
                f"unfreezing, or call add_param_group with (name, parameter) pairs, their algorithm and weight_decay "
                f"('adamw' and 0.0 are safe)",
            )

    @property
    def skipped_steps(self) -> int:
        """Steps skipped because of non-finite gradients. Reading it waits for the device; it is not saved."""
        return self._counters.skipped_steps

    def set_peak_lr(self, peak_lr: Any, *, group: int | None = None) -> None:
        """Set eta_max: a number, None or "running_max" for all groups or one, or from a scheduler.

        Args:
            peak_lr: the highest learning rate of the run, or a scheduler, whose `max_lrs` or `base_lrs` set
                the peaks of groups without a `peak_lr`. A single number requires equal rates in all groups.
            group: change only the group with this number.
        """
        if group is not None and group not in range(len(self.param_groups)):
            raise ValueError(f"group={group!r}: this optimizer has param groups 0 to {len(self.param_groups) - 1}")
        numbers = range(len(self.param_groups)) if group is None else [group]
        chosen = [self.param_groups[number] for number in numbers]
        scheduler = peak_lr
        while callable(getattr(inner := getattr(scheduler, "scheduler", None), "step", None)):  # Accelerate's wrapper
            scheduler = inner
        if hasattr(scheduler, "step") and hasattr(scheduler, "optimizer"):
            if checkpoint.unwrap_optimizer(scheduler.optimizer) is not self:
                raise ValueError(
                    f"this {type(scheduler).__name__} schedules another optimizer; pass a scheduler of this one"
                )
            peaks = peak.scheduler_peaks(scheduler)
            for number, target in zip(numbers, chosen, strict=True):
                if target["peak_lr"] is None:
                    peak.set_resolved_peak(target, peaks[number])
        else:
            setting = validate_option("peak_lr", peak_lr)
            peak.refuse_shared(setting, list(filter(needs_peak, chosen)))
            for target in chosen:
                target["peak_lr"] = setting
                peak.set_resolved_peak(target, setting if isinstance(setting, float) else None)

    def summary(self) -> Summary:
        """What the last step did: matrices orthogonalized, parameters moved by each algorithm, decay and peak.

        Waits for the device.

        Examples:
            >>> import torch
            >>> from muonsw import MuonSW
            >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.RMSNorm(8), torch.nn.Linear(8, 8))
            >>> optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.1)
            >>> model(torch.ones(2, 8)).square().mean().backward()
            >>> optimizer.step()
            >>> optimizer.summary().matrices
            2
            >>> optimizer.summary().parameters
            {'muon': 128, 'adamw': 24}
        """
        skipped = not self._last_finite
        summaries = []
        for number, group in enumerate(self.param_groups):
            batches = [(params, lr) for place, params, lr in self._last if place == number]
            moved = [] if skipped else [param for params, _ in batches for param in params]
            lr = float(batches[0][1] if batches else group["lr"])
            view = ALGORITHMS[group["algorithm"]].view(group)
            summaries.append(
                GroupSummary(
                    group=number,
                    role=group["role"],
                    algorithm=group["algorithm"],
                    parameters=sum(param.numel() for param in moved),
                    matrices=sum(view.count(param.shape) for param in moved) if view else 0,
                    lr=lr,
                    rule=group["decay"] if group["weight_decay"] else "none",
                    norm=group["norm"] if norm_rules.acts(group) else norm_rules.FREE,
                    decay=phi_of(group, lr, max(1, group["step_count"])) if moved else 0.0,
                    peak_lr=peak.eta_max(group) if needs_peak(group) else None,
                    highest_lr=group["highest_lr"],
                )
            )
        return Summary(tuple(summaries), skipped, self.skipped_steps, state_bytes(self.param_groups))

    def state_dict(self) -> dict[str, Any]:
        """State and param groups, peaks included, as plain data that loads with `weights_only=True`.

        Warns if steps were skipped since the last warning.
        """
        self._counters.warn_of_skips()
        self._wait_for_host()
        return super().state_dict()

    def _wait_for_host(self) -> None:
        states = [(param.device, state.values()) for param, state in self.state.items() if param.is_cuda]
        for device in {device for device, values in states if any(isinstance(v, Tensor) and v.is_cpu for v in values)}:
            wait_for_host(device)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer, or of torch's Muon, AdamW or SGD.

        State and options are matched by parameter name if both sides have names, else by position. The saved peak
        learning rate replaces the current one, with a warning if they differ. Nothing changes if this raises.
        """
        checkpoint.load(self, state_dict, super().load_state_dict)
        self._replay = Replay()  # its graph would keep the old state alive
        self._allocated.clear()

    def __getstate__(self) -> dict[str, Any]:
        self._wait_for_host()
        settings = {key: vars(self)[key] for key in SETTINGS}
        return {**super().__getstate__(), **settings, "_reasons": self._reasons}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_counters" not in self.__dict__:
            self._reset()
        super().__setstate__(state)
        self._attach_addons()  # copies have none of torch's hooks

    def _patch_step_function(self) -> None:
        """Keep torch from wrapping `step` again in every subclass.

        Its hooks run inside `step`, so they also run once if a subclass overrides it and calls `super().step()`.
        """
        self._zero_grad_profile_name = f"Optimizer.zero_grad#{type(self).__name__}.zero_grad"

    def _attach_addons(self) -> None:
        norm_rules.attach(self)
        gradient_norm.attach(self)

    def _reset(self) -> None:
        self._counters = Counters()
        self._last: list[tuple[int, list[Tensor], float]] = []  # group number, parameters and lr of each batch
        self._last_finite: bool | Flag = True  # whether the last step was taken
        # modules, not tensors: `model.to` cannot swap tensor subclasses that have weak references
        self._left_out: list[tuple[str, weakref.ref[torch.nn.Module], str]] = []
        self._reasons: dict[str, str] = {}
        self._ranks = Ranks()
        self._replay = Replay()
        self._allocated: dict[int, Any] = {}  # by group: the options its state was allocated for
        self._addons: set[str] = set()  # add-ons whose hooks are registered


# the summary of the last step


@dataclass(frozen=True)
class GroupSummary:
    """One param group in the last step."""

    group: int  # its number
    role: str | None
    algorithm: str
    parameters: int  # scalars moved; excludes parameters without a gradient
    matrices: int  # matrices orthogonalized
    lr: float  # of the step
    rule: str  # the decay rule
    norm: str  # the norm rule, "free" if none acts
    decay: float  # phi, the fraction of each weight that decay removed
    peak_lr: float | None  # the divisor of the decay; None if the rule needs none or it is not known yet
    highest_lr: float | None  # so far


@dataclass(frozen=True)
class Summary:
    """What the last step did; `print` shows it as a table."""

    groups: tuple[GroupSummary, ...]
    skipped: bool  # whether that step changed nothing because a gradient was not finite
    skipped_steps: int  # so far
    state: dict[str, int]  # bytes of optimizer state on this rank by key, even before it is allocated

    @property
    def matrices(self) -> int:
        """Matrices orthogonalized."""
        return sum(group.matrices for group in self.groups)

    @property
    def parameters(self) -> dict[str, int]:
        """Scalars moved by each algorithm."""
        moved: dict[str, int] = {}
        for group in self.groups:
            moved[group.algorithm] = moved.get(group.algorithm, 0) + group.parameters
        return moved

    def __str__(self) -> str:
        moved = ", ".join(f"{counted(count, 'parameter')} by {name}" for name, count in self.parameters.items())
        first = f"{counted(self.matrices, 'matrix', 'matrices')} orthogonalized; moved {moved}"
        if self.skipped:
            first = "the last step was skipped: a gradient was not finite"
        rows = [("group", "role", "algorithm", "parameters", "matrices", "lr", "rule", "decay", "peak")]
        for g in self.groups:
            rule = g.rule if g.norm == norm_rules.FREE else g.norm if g.rule == "none" else f"{g.rule}, {g.norm}"
            peak_lr = "-" if g.peak_lr is None else f"{g.peak_lr:.4g}"
            sizes = (f"{g.parameters:,}", str(g.matrices), f"{g.lr:.4g}")
            rows.append((str(g.group), g.role or "-", g.algorithm, *sizes, rule, f"{g.decay:.4g}", peak_lr))
        return f"{first}\n{text_table(rows)}\n{state_line(self.state)}"


def state_line(state: dict[str, int]) -> str:
    """Bytes of state by key as a line, largest first.

    Examples:
        >>> state_line({"step": 8, "momentum_buffer": 2**20})
        'state: 1.0 MiB (momentum_buffer 1.0 MiB, step 8 bytes)'
    """
    by_size = sorted(state.items(), key=lambda entry: -entry[1])
    parts = ", ".join(f"{key} {sized(count)}" for key, count in by_size)
    return f"state: {sized(sum(state.values()))}" + (f" ({parts})" if parts else "")
