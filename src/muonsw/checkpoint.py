"""Save and load states: this library's, and those of torch's Muon, AdamW and SGD.

A load translates the saved groups, matches them with the current ones, and checks options and shapes before torch
replaces anything. The end of the file unwraps optimizers from frameworks' wrappers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from muonsw import peak
from muonsw.algorithms import ALGORITHMS
from muonsw.codecs import is_code, refuse_shards
from muonsw.decay import LAMBDA_KEYS, decays, needs_peak, require_length, user_weight_decay
from muonsw.options import BOOKKEEPING, CHECKS, OPTIONAL, REMOVED, prune, validate_option
from muonsw.orthogonalize import NS5
from muonsw.precision import SCALE
from muonsw.routing.facts import WRAPPER_WORDS
from muonsw.slots import EMPTY_SLOTS
from muonsw.state import layouts, restored
from muonsw.text import listed, users_line
from muonsw.work import Group, label_of, named_params

if TYPE_CHECKING:
    from muonsw.optimizer import ScaledDecayOptimizer

StateDict = dict[str, Any]

# Options that choose the update rule.
_RULES = ("algorithm", "orthogonalizer", "precondition", "normalize", "norm")

# Names of options in early states.
_RENAMED = {"precondition_period": "precondition_frequency", "max_precond_dim": "precondition_max_dim"}

# Options that identify a torch optimizer's groups, with our algorithm.
_TORCH_ALGORITHMS = {"adjust_lr_fn": "muon", "amsgrad": "adamw", "dampening": "sgd"}

# Keys of torch's groups that have no counterpart here; those that change the update rule are checked.
_TORCH_KEYS = ("foreach", "fused", "differentiable", "decoupled_weight_decay", "amsgrad", "ns_coefficients")


def load(optimizer: ScaledDecayOptimizer, saved: StateDict, load_state_dict: Callable[[StateDict], None]) -> None:
    """Translate a saved state and load it with torch's `load_state_dict`; restore everything on error.

    The translation runs after the user's pre-hooks, and `restored` before the user's post-hooks.
    """
    groups, state = optimizer.param_groups, optimizer.state
    translated: StateDict = {}

    def before(_: Optimizer, state_dict: StateDict) -> StateDict:
        translated.update(translated_state(state_dict, groups))
        return translated

    def after(_: Optimizer) -> None:
        for old, group in zip(translated["param_groups"], optimizer.param_groups, strict=True):
            for key, param in zip(old["params"], group["params"], strict=True):
                if loaded := translated["state"].get(key):  # torch has cast the state to the parameter's dtype
                    optimizer.state[param] = restored(loaded, group, param)

    handles = (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    )
    try:
        load_state_dict(saved)
        for group in optimizer.param_groups:
            prune(group)
        optimizer._attach_addons()
        _warn_of_other_rules(optimizer.param_groups, groups)
        _settle_peaks(optimizer.param_groups, groups, saved)
    except BaseException:
        optimizer.param_groups, optimizer.state = groups, state
        raise
    finally:
        for handle in handles:
            handle.remove()


def _warn_of_other_rules(groups: list[Group], before: list[Group]) -> None:
    for number, (group, old) in enumerate(zip(groups, before, strict=True)):
        changed = [key for key in _RULES if group.get(key) != old.get(key)]
        if changed:
            built, loaded = (", ".join(f"{key}={each.get(key)!r}" for key in changed) for each in (old, group))
            warnings.warn(
                f"{label_of(group, number)} was built with {built} and loaded {loaded}, which it keeps; to train with "
                f"your options, start with fresh state, or set them in the saved groups before the load",
                stacklevel=users_line(),
            )


def _settle_peaks(groups: list[Group], before: list[Group], saved: StateDict) -> None:
    """Warn if a loaded peak differs from the one this optimizer was built for, and fill in unsaved `highest_lr`.

    If both sides have the same constructor rate, this is a resumed run, and a scheduler may have raised its peak since.
    """
    for number, (group, old) in enumerate(zip(groups, before, strict=True)):
        mine, setting = old["peak_lr"], group["peak_lr"]
        built_for = mine or old["resolved_peak_lr"] or peak.expected_peak(old)
        loaded = group["resolved_peak_lr"] or setting
        is_resumed = setting is mine is None and not peak.differ(old["constructor_lr"], float(group["constructor_lr"]))
        if not loaded or setting == peak.RUNNING_MAX or is_resumed or not needs_peak(group):
            continue
        if built_for == peak.RUNNING_MAX or peak.differ(loaded, built_for):
            built_for, loaded = (f"{x:.8g}" if isinstance(x, float) else repr(x) for x in (built_for, loaded))
            warnings.warn(
                f"{label_of(group, number)} was built for a peak learning rate of {built_for} and loaded one of "
                f"{loaded}, which it keeps. If this is a new run, call set_peak_lr({built_for}, group={number})",
                peak.PeakLRWarning,
                stacklevel=users_line(),
            )
    if not any("highest_lr" in group for group in saved["param_groups"]):  # assume that the peak was reached
        for group in groups:
            group["highest_lr"] = group["resolved_peak_lr"] or peak.expected_peak(group)


# translate a saved state and refuse one that does not fit, without changing the optimizer


def translated_state(saved: StateDict, groups: list[Group]) -> StateDict:
    """Copy a saved state into the groups of this optimizer, each parameter with its saved options.

    Options missing from the saved groups come from this optimizer; a missing peak is resolved as in a new run.
    """
    if not {"state", "param_groups"} <= saved.keys() or any("params" not in group for group in saved["param_groups"]):
        raise ValueError(
            f"incomplete state_dict: it needs state and param_groups with params, and has "
            f"{', '.join(map(str, saved)) or 'nothing'}; pass the result of optimizer.state_dict()"
        )
    saved_groups = [group if "algorithm" in group else _translated(group) for group in saved["param_groups"]]
    completed: list[Group] = []
    for number, (old, here) in enumerate(zip(_matched(saved_groups, groups), groups, strict=True)):
        # Other libraries may give the same names to different averages. Our own state may change algorithm if it fits.
        if old["params"] and "peak_lr" not in old and old.get("algorithm") != here["algorithm"]:
            source = f"torch's {old['algorithm']}" if "algorithm" in old else "an unknown optimizer"
            raise ValueError(
                f"param group {number} has algorithm={here['algorithm']!r}, but the saved state is from {source}; "
                f"build the optimizer with the saved algorithm, or start with fresh state"
            )
        group = {key: value for key, value in old.items() if key not in _RENAMED}
        for former, key in _RENAMED.items():
            if former in old and group.get(key) is None:
                group[key] = old[former]
        known = CHECKS.keys() | REMOVED.keys()
        group = {key: validate_option(key, value) if key in known else value for key, value in group.items()}
        fresh = {**BOOKKEEPING, "constructor_lr": here["constructor_lr"]}
        unsaved: Group = {key: here[key] for key in ("param_names", "offload") if key in here}
        # our own groups lack an option only if it had its default; the length of the run may be new
        defaults = OPTIONAL - {"total_steps"} if "peak_lr" in old else ()
        inherited = {key: value for key, value in here.items() if key not in defaults}
        completed.append({**inherited, **fresh, **group, **unsaved})
        _refuse_unfit(completed[-1], here, number, saved["state"])
    return {**saved, "param_groups": completed}


def _translated(group: Group) -> Group:
    for key in ("amsgrad", "dampening"):
        if group.get(key):
            raise ValueError(
                f"the saved state is from an optimizer with {key}={group[key]!r}, which has no counterpart here"
            )
    if group.get("decoupled_weight_decay") is False and float(group["weight_decay"]):
        raise ValueError(
            f"the saved state is from Adam with weight_decay={float(group['weight_decay']):g}, added to the gradient; "
            f"here decay is decoupled. To continue from its averages, set weight_decay to 0 in the saved groups"
        )
    coefficients = group.get("ns_coefficients")
    if coefficients is not None and tuple(coefficients) != NS5:
        raise ValueError(
            f"the saved state used Newton-Schulz coefficients {tuple(coefficients)}; register an orthogonalizer with "
            f"them, and remove ns_coefficients from the saved groups"
        )
    translated = {key: value for key, value in group.items() if key not in (*_TORCH_KEYS, *LAMBDA_KEYS)}
    for key in _TORCH_ALGORITHMS.keys() & group.keys():
        translated["algorithm"] = _TORCH_ALGORITHMS[key]
    if "weight_decay" in group:
        translated["weight_decay"] = user_weight_decay(group)
    if "adjust_lr_fn" in translated:
        scale = translated.pop("adjust_lr_fn")
        translated["scale"] = {None: "original", "spectral_unclamped": "spectral"}.get(scale, scale)
        translated["momentum_form"] = "ema"
        translated.pop("eps", None)  # a lower bound on the norm in torch's Muon; ours is scale-invariant
    if translated.pop("dampening", None) is not None:
        translated["momentum_form"] = "heavy_ball"
    return translated


def _matched(saved: list[Group], groups: list[Group]) -> list[Group]:
    """The saved options and state keys for each group: by name if both sides have the same names, else by position.

    torch matches by position alone, so reordered parameters of equal shape would swap states, and groups their options.
    """
    names_here = [_names(group) for group in groups]
    members = {name: (key, group) for group in saved for name, key in zip(_names(group), group["params"], strict=False)}
    sizes = [sum(len(group["params"]) for group in side) for side in (saved, groups)]
    if sizes != [len(members)] * 2 or sorted(members) != sorted(name for names in names_here for name in names):
        return _matched_by_place(saved, groups)
    matched = []
    for names in names_here:
        group: Group = members[names[0]][1] if names else {}
        is_split = any(members[name][1] is not group for name in names)
        # If groups were merged or split, distributed checkpoint passes the options of just one of them.
        if names and isinstance(group["params"][0], str):
            known = {_plain_name(name) for name in group.get("param_names") or names}
            is_split |= "lr" not in group or 0 < len(known & set(names)) < len(names)
        if is_split:
            raise ValueError(f"{names[0]} was saved in another param group; build the optimizer with the saved groups")
        matched.append({**group, "params": [members[name][0] for name in names]})
    return matched


def _matched_by_place(saved: list[Group], groups: list[Group]) -> list[Group]:
    """Match groups by position, as torch does; names known to both sides must agree."""
    sizes, sizes_here = ([len(group["params"]) for group in side] for side in (saved, groups))
    if sizes != sizes_here:
        raise ValueError(
            f"the saved state has param groups of {listed(list(map(str, sizes)))} parameters and this optimizer of "
            f"{listed(list(map(str, sizes_here)))}; build the optimizer with the same groups, such as "
            f"AdamWSW(model.parameters(), lr=...) for torch.optim.AdamW(model.parameters())"
        )
    saved_names, names_here = ({name for group in side for name in _names(group)} for side in (saved, groups))
    for old, here in zip(saved, groups, strict=True):
        for name, name_here in zip(_names(old), _names(here), strict=False):
            if name != name_here and (name in names_here or name_here in saved_names):
                raise ValueError(
                    f"{name_here} would get the state of {name}: parameters were renamed and reordered; write the "
                    f"current names into param_names of the saved groups"
                )
    return saved


def _names(group: Group) -> list[str]:
    """The names of a group's parameters, if it has them; distributed checkpoints have names instead of numbers."""
    params = group["params"]
    named = bool(params) and all(isinstance(param, str) for param in params)
    names = params if named else group.get("param_names") or ()
    return [_plain_name(name) for name in names] if len(names) == len(params) else []


def _plain_name(name: str) -> str:
    return ".".join(word for word in name.split(".") if word not in {*WRAPPER_WORDS, "module"})


def _refuse_unfit(group: Group, here: Group, number: int, states: dict[Any, Any]) -> None:
    """Refuse loaded options that this optimizer would not accept, and states of other shapes."""
    if decays(group):
        require_length(group["decay"], group.get("total_steps"))
    algorithm = ALGORITHMS[group["algorithm"]]
    needed = algorithm.state({**group, **EMPTY_SLOTS})  # state of preconditioners and normalizers may be missing
    for key_of_state, (name, param) in zip(group["params"], named_params(here, number), strict=True):
        algorithm.validate(group, name, param)
        refuse_shards(name, group, param)
        state, known = states.get(key_of_state, {}), layouts({**here, **group}, param)
        missing = needed.keys() - {known[key].name for key in state if key in known}
        if state and missing:
            raise ValueError(
                f"the saved state of {name} holds {', '.join(state)} but algorithm={group['algorithm']!r} "
                f"needs {', '.join(sorted(missing))}; it was saved by another algorithm"
            )
        codes = [key for key, value in state.items() if isinstance(value, Tensor) and is_code(value)]
        for key in [key for key in codes if f"{key}{SCALE}" not in state]:
            raise ValueError(f"the saved {key} of {name} is in 8 bits, but its scales {key}{SCALE} are missing")
        for key, layout in known.items():
            value = state.get(key)
            if isinstance(value, Tensor) and value.shape != layout.shape:
                raise ValueError(
                    f"the saved {key} of {name} has shape {tuple(value.shape)}, but {tuple(layout.shape)} is needed"
                )


# optimizers inside wrappers, such as those of Accelerate's `prepare`


def unwrap_optimizer(optimizer: Any) -> Any:
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def required_optimizer(optimizer: Any, caller: str) -> Optimizer:
    """Unwrap an optimizer; anything else, such as a model, is a TypeError."""
    optimizer = unwrap_optimizer(optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{caller} needs a torch.optim.Optimizer, not a {type(optimizer).__name__}; if it is a wrapper, pass the "
            f"optimizer inside"
        )
    return optimizer
