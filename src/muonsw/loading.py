"""Loading a saved state: ours, an older one, or one of torch's own optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from muonsw import moments
from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import Group
from muonsw.distributed.shards import put_like
from muonsw.options import CHECKS, validate_option
from muonsw.orthogonalize import NS5
from muonsw.routing.names import WRAPPER_WORDS
from muonsw.state import dtype_of

StateDict = dict[str, Any]

# What may be held in a tensor of the group that a graph knows.
_KINDS = ("lr", "step_count", "gradient_average")

# Keys of torch's groups that mean nothing here once they have been looked at.
_TORCH_KEYS = ("foreach", "fused", "differentiable", "decoupled_weight_decay", "amsgrad", "ns_coefficients")


def adopt(saved: StateDict, groups: list[Group]) -> StateDict:
    """A copy of a saved state whose groups have every key that this optimizer needs.

    What the saved groups do not say, this optimizer's own settings do; a peak they do not know is found anew.
    """
    if len(saved["param_groups"]) != len(groups):
        raise ValueError(
            f"the saved state has {len(saved['param_groups'])} param groups and this optimizer {len(groups)}; "
            f"build it with the same groups"
        )
    adopted = []
    for old, own in zip(_match_by_name(saved["param_groups"], groups), groups, strict=True):
        if len(old["params"]) != len(own["params"]):
            raise ValueError(
                f"a saved param group has {len(old['params'])} parameters and this optimizer's has "
                f"{len(own['params'])}; build it with the same groups"
            )
        own_settings = {key: value for key, value in own.items() if key not in ("params", "param_names")}
        fresh: Group = {"resolved_peak_lr": None, "peak_record": None, "highest_lr": None}
        fresh |= {"step_count": 0, "gradient_average": None}
        adopted.append({**own_settings, **fresh, **_checked(translate(old))})
        _check_states(saved["state"], adopted[-1], own)
    return {**saved, "param_groups": adopted}


def _match_by_name(saved: list[Group], groups: list[Group]) -> list[Group]:
    """Saved groups with their parameters in the order of this optimizer's, where both know the same names.

    torch goes by position alone, so two parameters of equal shape that have changed places would swap their states.
    """
    theirs = {
        plain_name(name): number
        for group in saved
        for name, number in zip(group.get("param_names") or (), group["params"], strict=False)
    }
    wanted = [[plain_name(name) for name in group.get("param_names") or ()] for group in groups]
    own = [name for names in wanted for name in names]
    if (
        len(own) != sum(len(group["params"]) for group in groups)
        or len(set(own)) != len(own)
        or set(own) != set(theirs)
    ):
        return saved
    return [
        {**old, "params": [theirs[name] for name in names], "param_names": list(group["param_names"])}
        for old, group, names in zip(saved, groups, wanted, strict=True)
    ]


def plain_name(name: str) -> str:
    """A parameter's name without what compilers and parallel wrappers put into it."""
    return ".".join(word for word in name.split(".") if word not in {*WRAPPER_WORDS, "module"})


def translate(group: Group) -> Group:
    """A group of torch's Muon, AdamW or SGD in this library's words; a group of ours as it is."""
    if "algorithm" in group:
        return group
    _refuse_other_rules(group)
    coefficients = group.get("ns_coefficients")
    if coefficients is not None and tuple(coefficients) != NS5:
        raise ValueError(
            f"the saved state used Newton-Schulz coefficients {tuple(coefficients)}; register an orthogonalizer with "
            f"them, and remove ns_coefficients from the saved groups"
        )
    translated = {key: value for key, value in group.items() if key not in _TORCH_KEYS}
    if "adjust_lr_fn" in translated:
        translated["scale"] = translated.pop("adjust_lr_fn") or "original"
        translated.pop("eps", None)  # torch's floor under the norm, which scale invariance makes unnecessary
    if translated.pop("dampening", 0):
        raise ValueError("the saved state is of SGD with dampening, which has no counterpart here")
    return translated


def _refuse_other_rules(group: Group) -> None:
    """States that have the keys of one of our algorithms, and were made by another one."""
    if group.get("amsgrad"):
        raise ValueError("the saved state is of AdamW with amsgrad=True, which has no counterpart here")
    if "momentum_decay" in group or ("decoupled_weight_decay" in group and "amsgrad" not in group):
        raise ValueError("the saved state is of RAdam or NAdam, whose averages mean something else; start AdamW afresh")
    if group.get("decoupled_weight_decay") is False and float(group["weight_decay"]):
        raise ValueError(
            f"the saved state is of Adam with weight_decay={float(group['weight_decay']):g}, which it adds to the "
            f"gradient; here decay is decoupled and means something else. To go on from its averages, set weight_decay "
            f"to 0 in the saved groups, and choose a decoupled one in optimizer.param_groups after loading"
        )


def _checked(group: Group) -> Group:
    """Names of rules and functions must be known here, before anything is replaced; unknown keys are kept."""
    return {key: validate_option(key, value) if key in CHECKS else value for key, value in group.items()}


def _check_states(states: dict[Any, Any], saved: Group, own: Group) -> None:
    """Every saved state must fit the parameter it is for, before anything is replaced."""
    names = own.get("param_names") or [f"parameter {place}" for place in range(len(own["params"]))]
    needed = ALGORITHMS[saved["algorithm"]].state_keys(saved)
    for name, number, param in zip(names, saved["params"], own["params"], strict=True):
        state = states.get(number) or {}
        missing = [key for key in needed if key not in state]
        if state and missing:
            raise ValueError(
                f"the saved state of {name} holds {', '.join(state)} but algorithm={saved['algorithm']!r} "
                f"needs {', '.join(missing)}; it was saved by another algorithm"
            )
        for key, value in state.items():
            if isinstance(value, Tensor) and key != "radius" and value.dim() and value.shape != param.shape:
                raise ValueError(
                    f"the saved {key} of {name} has shape {tuple(value.shape)}, but the parameter has "
                    f"{tuple(param.shape)}"
                )


def restore_dtypes(saved: StateDict, optimizer: torch.optim.Optimizer) -> None:
    """Give state its own dtype and place again; torch's loading casts it to the parameter's.

    The state is copied: a snapshot that is loaded must not change with the steps that follow.
    """
    for old, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for number, param in zip(old["params"], group["params"], strict=True):
            for key, value in (saved["state"].get(number) or {}).items():
                if key == "step" or isinstance(value, Tensor):  # older states count steps in plain numbers
                    dtype = dtype_of(key, group, param)
                    kept = torch.as_tensor(value) if key == "step" else put_like(param, value)
                    optimizer.state[param][key] = kept.to(param.device, dtype, copy=True)


@contextlib.contextmanager
def through_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Adopt a state after the user's hooks before loading, and restore dtypes before those after it."""
    before_load = [{key: group[key] for key in _KINDS} for group in optimizer.param_groups]
    loaded: list[StateDict] = []

    def before(_: torch.optim.Optimizer, saved: StateDict) -> StateDict:
        loaded.append(adopt(saved, optimizer.param_groups))
        return loaded[0]

    def after(_: torch.optim.Optimizer) -> None:
        restore_dtypes(loaded[0], optimizer)
        for group, own in zip(optimizer.param_groups, before_load, strict=True):
            group["lr"] = keep_kind(group["lr"], own["lr"])
            for key in ("step_count", "gradient_average"):
                group[key] = moments.loaded(group[key], own[key])

    handles = (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def keep_kind(loaded: float | Tensor, own: float | Tensor) -> float | Tensor:
    """A loaded learning rate as the kind this optimizer was built with; its tensor is filled in place."""
    if isinstance(own, Tensor):
        return own.fill_(float(loaded))
    return float(loaded)
