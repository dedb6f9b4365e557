"""Scaled decay for the optimizer that you already have.

An optimizer with decoupled decay shrinks weights by `lr * weight_decay`. Before each step a hook sets `weight_decay` so
that this product follows the decay rule. Lambda, peak and step count live in the param groups, so they are saved and
loaded with the optimizer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from muonsw import peak
from muonsw.checkpoint import required_optimizer
from muonsw.decay import DECAY_RULES, LAMBDA_KEYS, check_rates, phi_of, require_length, user_weight_decay
from muonsw.nonfinite import Counters
from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.options import validate_option

# Keys that this file adds to param groups.
_PEAK_KEYS = ("constructor_lr", "peak_lr", "resolved_peak_lr", "peak_record")
_KEYS = (*_PEAK_KEYS, *LAMBDA_KEYS, "highest_lr", "step_count", "decay")
_HANDLE = "_scaled_weight_decay"


def scale_weight_decay(
    optimizer: Optimizer,
    decay: str = "scaled",
    *,
    peak_lr: float | str | None = None,
    total_steps: int | None = None,
) -> ScaledWeightDecay:
    """Make an optimizer with decoupled weight decay follow a decay rule, by default lambda * lr^2 / peak.

    Call it once, after building the optimizer. Hooks are not saved: call it again on a copy, and in a resumed run,
    there before you load the state. If you set a group's `weight_decay` later, it becomes the group's lambda.

    Args:
        optimizer: torch's AdamW or Muon, or another with decoupled decay; or Accelerate's wrapper around one.
        decay: a name from `DECAY_RULES`; not a rule that depends on gradients.
        peak_lr: the highest learning rate of the run, which replaces a loaded one; None takes the rate that a scheduler
            recorded, else the current one. "running_max" follows the highest rate so far.
        total_steps: the length of the run, for rules that depend on it.

    Returns:
        A handle; its `remove()` restores each group's `weight_decay`.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
        >>> handle = scale_weight_decay(optimizer)
        >>> optimizer.param_groups[0]["lr"] = 0.05
        >>> weight.sum().backward(); optimizer.step()
        >>> optimizer.param_groups[0]["weight_decay"]
        0.25
    """
    rule = DECAY_RULES[validate_option("decay", decay)]
    optimizer = required_optimizer(optimizer, "scale_weight_decay")
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if rule.uses_gradient:
        raise ValueError(f"decay={decay!r} follows the gradients, which {name} does not expose")
    setting, length = validate_option("peak_lr", peak_lr), validate_option("total_steps", total_steps)
    require_length(decay, length)
    if hasattr(optimizer, _HANDLE):
        raise ValueError(f"this {name} already has scaled decay; call remove() on its handle first")
    if isinstance(optimizer, ScaledDecayOptimizer):
        raise ValueError(f"{name} is an optimizer of this library; pass decay= to it instead")
    if not all("weight_decay" in group for group in groups) or _decays_otherwise(optimizer):
        raise ValueError(
            f"{name} does not shrink weights by lr * weight_decay, so its decay cannot be scaled; build it with "
            f"decoupled decay if it has that option, or use AdamWSW, SGDSW or MuonSW"
        )
    decayed = [group for group in groups if group["weight_decay"]]
    for group in decayed if rule.uses_peak and _has_stepped(optimizer) else ():
        if setting is None and "constructor_lr" not in group and peak.scheduler_record(group) is None:
            raise ValueError(
                f"this optimizer has taken steps, no scheduler has recorded its peak, and the learning rate is now "
                f"{float(group['lr']):g}; pass peak_lr=<the highest learning rate of the run>"
            )
    peak.refuse_shared(setting, decayed)
    return ScaledWeightDecay(optimizer, decay, setting, length)


class ScaledWeightDecay:
    """Sets the `weight_decay` of an optimizer's groups before each step."""

    def __init__(self, optimizer: Optimizer, decay: str, peak_lr: float | str | None, total_steps: int | None) -> None:
        self.optimizer, self.decay, self.peak_lr, self.total_steps = optimizer, decay, peak_lr, total_steps
        self._counters = Counters()
        for group in optimizer.param_groups:
            self._join(group)
            if peak_lr is not None:
                group["peak_lr"] = peak_lr
        setattr(optimizer, _HANDLE, self)
        self._handles = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
        )

    def remove(self) -> None:
        """Stop, and restore each group's `weight_decay`."""
        for handle in self._handles:
            handle.remove()
        delattr(self.optimizer, _HANDLE)
        for group in self.optimizer.param_groups:
            _set(group, "weight_decay", user_weight_decay(group))
            for key in _KEYS:
                group.pop(key, None)

    def _join(self, group: dict[str, Any]) -> None:
        """Add the keys that a group did not get from a loaded state."""
        group["decay"] = self.decay
        if "step_count" in group:
            return
        counts = [other["step_count"] for other in self.optimizer.param_groups if "step_count" in other]
        counts += [float(self.optimizer.state[p].get("step", 0)) for p in group["params"] if p in self.optimizer.state]
        defaults = {
            "base_weight_decay": float(group["weight_decay"]),
            "driven_weight_decay": float(group["weight_decay"]),
            "constructor_lr": float(group["lr"]),
            "peak_lr": self.peak_lr,
            "resolved_peak_lr": None,
            "peak_record": None,
            "step_count": int(max(counts, default=0)),
        }
        group.update({**defaults, **group})
        # A resumed run may be past its peak, so assume that it was reached.
        group["highest_lr"] = peak.expected_peak(group) if _has_stepped(self.optimizer) else None

    def _before_load(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Keep this optimizer's peak if the saved state has none."""
        groups = [dict(saved) for saved in state["param_groups"]]
        for saved, group in zip(groups, optimizer.param_groups, strict=False):
            if "constructor_lr" not in saved:
                saved.update({key: group[key] for key in _PEAK_KEYS if key in group})
            if self.peak_lr is not None:
                saved["peak_lr"] = self.peak_lr
        return {**state, "param_groups": groups}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        groups = optimizer.param_groups
        if any(p.is_cuda for group in groups for p in group["params"][:1]) and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a CUDA graph would freeze the weight_decay of this step; step outside the graph")
        # Work on copies, so that an error changes no group.
        planned = [{**group, "peak": "group", "total_steps": self.total_steps} for group in groups]
        for number, group in enumerate(planned):
            self._join(group)
            group["base_weight_decay"] = group["weight_decay"] = float(user_weight_decay(group))
            check_rates(group, number, self._counters)
            group["step_count"] += 1
            phi = phi_of(group, group["lr"], group["step_count"])
            group["driven_weight_decay"] = phi / group["lr"] if group["lr"] else 0.0
        for group, plan in zip(groups, planned, strict=True):
            _set(group, "weight_decay", plan["driven_weight_decay"])
            group.update({key: plan[key] for key in _KEYS})


def _set(group: dict[str, Any], key: str, value: float) -> None:
    """Set a number; fill a tensor in place, because a CUDA graph may read it."""
    if isinstance(group[key], Tensor):
        group[key].fill_(value)
    else:
        group[key] = value


def _has_stepped(optimizer: Optimizer) -> bool:
    """Whether a step has written state; dion creates zeros before its first step."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return any(bool(value.any()) if isinstance(value, Tensor) else value for value in values)


@torch.no_grad()
def _decays_otherwise(optimizer: Optimizer) -> bool:
    """Step a copy of the optimizer on small weights; return whether decay differs from lr * weight_decay.

    It takes ten steps, because in the first ones some optimizers only initialize state or move along the gradient.
    """
    attributes = {key: value for key, value in vars(optimizer).items() if key != "step" and "hooks" not in key}
    if hasattr(optimizer, "__del__") or any(isinstance(value, Optimizer) for value in attributes.values()):
        return False  # deleting a copy would free shared resources, and stepping it would step the inner optimizer
    trial = object.__new__(type(optimizer))
    vars(trial).update(attributes)
    Optimizer.__setstate__(trial, {})  # creates new hooks; `step` was left out because schedulers bind it
    grads = {param: param.grad for group in optimizer.param_groups for param in group["params"]}
    lr, weights, before = 1e-3, [], []
    try:
        trial.param_groups, trial.state = [], defaultdict(dict)
        for group in optimizer.param_groups:
            device = next((param.device for param in group["params"]), None)
            for lam in (0.0, 1.0):
                weights.append(torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float32, device=device)))
                trial.param_groups.append({**copy.deepcopy({**group, "params": []}), "params": weights[-1:]})
                _set(trial.param_groups[-1], "lr", lr)
                _set(trial.param_groups[-1], "weight_decay", lam)
        for param in grads:
            param.grad = None  # protects the weights if the optimizer has a second list of parameters
        devices = [weight.device for weight in weights if weight.is_cuda]
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            for _ in range(10):
                before = [weight.clone() for weight in weights]
                for weight in weights:  # gradients along the weight or of size one would hide other kinds of decay
                    weight.grad = 3 * weight.new_tensor([1.0, -1.0]).repeat(4, 2)
                type(trial).step(trial)
    except Exception:
        return False  # it needs its usual training loop
    finally:
        for param, grad in grads.items():
            param.grad = grad
    moves = [weight - old for weight, old in zip(weights, before, strict=True)]
    triples = zip(moves[::2], moves[1::2], before[1::2], strict=True)
    return not all(torch.allclose(free - decayed, lr * old, rtol=0.02, atol=0) for free, decayed, old in triples)
