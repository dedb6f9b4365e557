"""Loading a saved state: ours, an older one, or one of torch's own optimizers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from muonsw import peak, rates
from muonsw.algorithms import ALGORITHMS
from muonsw.codecs import is_code, refuse_shards
from muonsw.decay import LAMBDA_KEYS, decays, own_weight_decay
from muonsw.options import BOOKKEEPING, CHECKS, differing_options, require_whole, validate_option
from muonsw.orthogonalize import NS5
from muonsw.peak import PeakLRWarning
from muonsw.precision import SCALE
from muonsw.routing.names import WRAPPER_WORDS
from muonsw.slots import EMPTY_SLOTS
from muonsw.state import layouts, restored
from muonsw.text import counted, users_line
from muonsw.work import Group, label_of

StateDict = dict[str, Any]

# What may be held in a tensor of the group that a graph knows.
_KINDS = ("lr", "weight_decay")

# What groups are called, which says nothing of how their parameters are trained.
_LABELS = ("name", "role")

# Keys of torch's groups that mean nothing here once they have been looked at.
_TORCH_KEYS = ("foreach", "fused", "differentiable", "decoupled_weight_decay", "amsgrad", "ns_coefficients")

# Options by which groups of torch's optimizers are known, and our name for their rule.
_OPTIONS_OF_TORCH = {"adjust_lr_fn": "muon", "amsgrad": "adamw", "dampening": "sgd"}

# Values of torch's adjust_lr_fn that have another name here.
_SCALES_OF_TORCH = {None: "original", "spectral_unclamped": "spectral"}

# Options by which rules differ from these three where they are set: torch's, and those of timm's optimizers.
_OF_OTHER_RULES = ("amsgrad", "caution", "delta", "trust_coeff")


class SavedParameter(NamedTuple):
    """A parameter of a saved state: its name, the key of its state, and the group that it was saved in."""

    name: str
    key: Any
    group: Group


def translated_state(saved: StateDict, groups: list[Group]) -> StateDict:
    """A copy of a saved state in this optimizer's groups, whose options are those that each parameter was saved with.

    What the saved groups do not say, this optimizer's own settings do; a peak they do not know is found anew.
    """
    _refuse_no_state(saved)
    theirs = [translate(group) for group in saved["param_groups"]]
    states = {key: _known(state) for key, state in saved["state"].items()}
    for group in theirs:
        _refuse_regrouped(group)
    matched = _by_name(theirs, groups)
    if matched is None:
        matched = _by_place(theirs, groups)
    if not any("algorithm" in group for group in saved["param_groups"]):
        _refuse_other_algorithms(matched, groups)
    completed = [_completed(_checked(_with_todays_options(old)), own) for old, own in zip(matched, groups, strict=True)]
    for number, (group, own) in enumerate(zip(completed, groups, strict=True)):
        _refuse_unfit(group, own, f"param group {number}")
        _check_states(states, group, own)
    return {**saved, "state": states, "param_groups": completed}


def _refuse_no_state(saved: StateDict) -> None:
    """Refuse what is no state of an optimizer: a whole checkpoint, or a state without its parameters' numbers."""
    if not {"state", "param_groups"} <= saved.keys():
        raise ValueError(
            f"a saved state has state and param_groups, and this holds {', '.join(map(str, saved)) or 'nothing'}; pass "
            f"what optimizer.state_dict() returned"
        )
    for number, group in enumerate(saved["param_groups"]):
        if "params" not in group:
            raise ValueError(f"param group {number} of the saved state has no params, the keys of its states")


def _known(state: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state without keys that say nothing: older SGDs of torch have None for the momentum they lack."""
    return {key: value for key, value in (state or {}).items() if value is not None}


def _refuse_regrouped(group: Group) -> None:
    """Refuse groups that torch's distributed checkpoint has joined or divided: it hands over the options of one."""
    named = {plain_name(name) for name in group.get("param_names") or ()}
    params = [param for param in group["params"] if isinstance(param, str)]
    strangers = [param for param in params if plain_name(param) not in named]
    if params and ("lr" not in group or 0 < len(strangers) < len(params)):  # all of them: names of another model
        raise ValueError(
            f"{strangers[0] if strangers else params[0]} was saved in another param group than those that share its "
            f"group here; build the optimizer with the groups that were saved"
        )


# Options that older versions, or torch's optimizers, saved, and today's names of those that are called otherwise now.
_REMOVED = ("capturable", "update_floor", "radial_brake")
_RENAMED = {"precondition_period": "precondition_frequency", "max_precond_dim": "precondition_max_dim"}


def _with_todays_options(saved: Group) -> Group:
    group = {key: value for key, value in saved.items() if key not in (*_REMOVED, *_RENAMED)}
    for old, new in _RENAMED.items():
        if old in saved and group.get(new) is None:  # older groups had options of other algorithms too
            group[new] = saved[old]
    return group


def _completed(saved: Group, own: Group) -> Group:
    """A saved group with every key that this optimizer needs, under its names for the parameters."""
    settings = {key: value for key, value in own.items() if key not in ("params", "param_names")}
    fresh = {**BOOKKEEPING, "constructor_lr": own["constructor_lr"]}
    names = {"param_names": own["param_names"]} if "param_names" in own else {}
    return {
        **settings,
        **fresh,
        **saved,
        **names,
        "offload": own["offload"],
    }


def _by_name(saved: list[Group], groups: list[Group]) -> list[Group] | None:
    """The saved options and state keys for each group, where both sides know the same names; else None.

    torch goes by position alone, so two parameters of equal shape that have changed places would swap their states, and
    two groups their options.
    """
    members = [
        SavedParameter(*entry, group) for group in saved for entry in zip(_names(group), group["params"], strict=False)
    ]
    found = {member.name: member for member in members}
    wanted = [_names(group) for group in groups]
    own = [name for names in wanted for name in names]
    complete = len(found) == _count(saved) and len(set(own)) == len(own) == _count(groups)
    if not complete or set(own) != found.keys():
        return None
    return [_gathered([found[name] for name in names]) for names in wanted]


def _names(group: Group) -> list[str]:
    """The names of a group's parameters, or nothing; distributed checkpoints have them in place of numbers."""
    params = group["params"]
    named = bool(params) and all(isinstance(param, str) for param in params)
    names = params if named else group.get("param_names") or ()
    return [plain_name(name) for name in names] if len(names) == len(params) else []


def _count(groups: list[Group]) -> int:
    return sum(len(group["params"]) for group in groups)


def _gathered(members: list[SavedParameter]) -> Group:
    """One group of parameters that may have been saved in several, if their options are the same."""
    keys = [member.key for member in members]
    if not members:
        return {"params": keys}
    first = members[0]
    others = [member for member in members if member.group is not first.group]
    for other in others:
        _refuse_mixture(first, other)
    labels = _LABELS if others else ()
    return {**{key: value for key, value in first.group.items() if key not in labels}, "params": keys}


def _refuse_mixture(one: SavedParameter, other: SavedParameter) -> None:
    found = differing_options(one.group, other.group, ignored=("params", "param_names", *_LABELS))
    if found:
        raise ValueError(
            f"{one.name} and {other.name} are in one param group of this optimizer and were saved with different "
            f"options: {'; '.join(f'{key} is {a!r} and {b!r}' for key, (a, b) in found.items())}. Build it with the "
            f"groups that were saved"
        )


def _by_place(saved: list[Group], groups: list[Group]) -> list[Group]:
    """The saved groups one by one, as torch matches them; names that both sides know must not contradict it."""
    if len(saved) != len(groups):
        remedy = "build it with the same groups"
        if len(saved) == 1 and "peak_lr" not in saved[0] and "algorithm" in saved[0]:  # of torch
            same = {"muon": "MuonSW", "adamw": "AdamWSW", "sgd": "SGDSW"}[saved[0]["algorithm"]]
            remedy = (
                f"to resume that run, load it into {same}(model.parameters(), lr=...) with the parameters in the same "
                f"order; to train with these groups, start without the saved state"
            )
        raise ValueError(
            f"the saved state has {counted(len(saved), 'param group')} and this optimizer {len(groups)}; {remedy}"
        )
    known, wanted = ({name for group in side for name in _names(group)} for side in (saved, groups))
    for old, own in zip(saved, groups, strict=True):
        if len(old["params"]) != len(own["params"]):
            raise ValueError(
                f"a saved param group has {len(old['params'])} parameters and this optimizer's has "
                f"{len(own['params'])}; build it with the same groups"
            )
        for theirs, mine in zip(_names(old), _names(own), strict=False):
            if theirs != mine and (theirs in wanted or mine in known):
                raise ValueError(
                    f"{mine} would get what was saved for {theirs}: the names of the saved state are not all known "
                    f"here, and those that are have changed places; write today's names into param_names of its groups"
                )
    return saved


def _refuse_unfit(group: Group, own: Group, label: str) -> None:
    """Refuse loaded options that could not have been given to this optimizer, before anything is replaced."""
    rates.require_run(group, label)
    names = own.get("param_names") or [f"parameter {place} of {label}" for place in range(len(own["params"]))]
    for name, param in zip(names, own["params"], strict=True):
        ALGORITHMS[group["algorithm"]].validate(group, name, param)
        refuse_shards(name, group, param)


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
    translated = {key: value for key, value in group.items() if key not in (*_TORCH_KEYS, *LAMBDA_KEYS)}
    for key in _OPTIONS_OF_TORCH.keys() & group.keys():
        translated["algorithm"] = _OPTIONS_OF_TORCH[key]
    if "weight_decay" in group:
        translated["weight_decay"] = own_weight_decay(group)
    if "adjust_lr_fn" in translated:
        scale = translated.pop("adjust_lr_fn")
        translated |= {"scale": _SCALES_OF_TORCH.get(scale, scale), "momentum_form": "ema"}
        translated.pop("eps", None)  # torch's floor under the norm, which scale invariance makes unnecessary
    if "dampening" in translated:
        if translated.pop("dampening"):
            raise ValueError("the saved state is of SGD with dampening, which has no counterpart here")
        translated["momentum_form"] = "heavy_ball"
    return translated


def _refuse_other_rules(group: Group) -> None:
    """States that have the keys of one of our algorithms, and were made by another one."""
    for key in [key for key in _OF_OTHER_RULES if group.get(key)]:
        raise ValueError(f"the saved state is of an optimizer with {key}={group[key]!r}, which has no counterpart here")
    if group.get("decoupled_weight_decay") is False and float(group["weight_decay"]):
        raise ValueError(
            f"the saved state is of Adam with weight_decay={float(group['weight_decay']):g}, which it adds to the "
            f"gradient; here decay is decoupled and means something else. To go on from its averages, set weight_decay "
            f"to 0 in the saved groups, and choose a decoupled one in optimizer.param_groups after loading"
        )


def _refuse_other_algorithms(saved: list[Group], groups: list[Group]) -> None:
    """Refuse what another library's optimizer saved, or torch's for a group with another algorithm.

    Their averages may have the same names and mean something else.
    """
    for number, (old, own) in enumerate(zip(saved, groups, strict=True)):
        if old["params"] and "algorithm" not in old:
            raise ValueError(
                f"the saved state is not of torch's Muon, AdamW or SGD: its groups hold "
                f"{', '.join(sorted(old.keys() - {'params'}))}; start with fresh state instead"
            )
        if old["params"] and old["algorithm"] != own["algorithm"]:
            raise ValueError(
                f"the saved state is of torch's {old['algorithm']}, and param group {number} of this optimizer has "
                f"algorithm={own['algorithm']!r}; build one with the algorithms that were saved, or start afresh"
            )


def _checked(group: Group) -> Group:
    """Names of rules and functions must be known here, before anything is replaced; unknown keys are kept."""
    for key in ("step_count", "update_count"):
        count = group.get(key, 0)
        require_whole(key, int(count) if isinstance(count, Tensor) else count, 0)
    average = group.get("gradient_average")
    scalars = average.tolist() if isinstance(average, Tensor) else average
    if scalars is not None and not _are_two_numbers(scalars):
        raise ValueError(
            f"a saved param group has gradient_average={average!r}; it must be two numbers, a mean square and its "
            f"weight, or None to begin anew"
        )
    return {key: validate_option(key, value) if key in CHECKS else value for key, value in group.items()}


def _are_two_numbers(value: Any) -> bool:
    pair = isinstance(value, list | tuple) and len(value) == 2
    return pair and all(isinstance(number, int | float) and number >= 0 for number in value)


def _check_states(states: dict[Any, Any], saved: Group, own: Group) -> None:
    """Every saved state must fit the parameter it is for, before anything is replaced."""
    names = own.get("param_names") or [f"parameter {place}" for place in range(len(own["params"]))]
    needed = ALGORITHMS[saved["algorithm"]].state({**saved, **EMPTY_SLOTS})  # what slots keep may begin anew
    for name, number, param in zip(names, saved["params"], own["params"], strict=True):
        state, known = states.get(number) or {}, layouts({**own, **saved}, param)
        missing = [key for key in needed if key not in state and f"{key}.0" not in state]
        if state and missing:
            raise ValueError(
                f"the saved state of {name} holds {', '.join(state)} but algorithm={saved['algorithm']!r} "
                f"needs {', '.join(missing)}; it was saved by another algorithm"
            )
        codes = [key for key, value in state.items() if isinstance(value, Tensor) and is_code(value)]
        for key in [key for key in codes if f"{key}{SCALE}" not in state]:
            raise ValueError(f"the saved {key} of {name} is in 8 bits, and {key}{SCALE}, its scales, is missing")
        for key, layout in known.items():
            value = state.get(key)
            if isinstance(value, Tensor) and value.shape != layout.shape:
                wanted = f"{tuple(layout.shape)} is needed"
                if layout.own_axis is None:
                    wanted = f"the parameter has {tuple(param.shape)}"
                raise ValueError(f"the saved {key} of {name} has shape {tuple(value.shape)}, but {wanted}")


def restore_states(saved: StateDict, optimizer: torch.optim.Optimizer) -> None:
    """Give state its own dtypes and places again; torch's loading casts it to the parameter's.

    The state is copied: a snapshot that is loaded must not change with the steps that follow.
    """
    for old, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        for number, param in zip(old["params"], group["params"], strict=True):
            if state := saved["state"].get(number):
                optimizer.state[param] = restored(state, group, param)


@contextlib.contextmanager
def saved_by_groups(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let a state that is saved meanwhile hold only what param groups have; torch would raise a KeyError for more."""
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    strays = {param: state for param, state in optimizer.state.items() if id(param) not in own}
    if strays:
        warnings.warn(
            f"the state of {len(strays)} parameters that are in no param group any more is not saved; to freeze "
            f"parameters, leave them in their group and call requires_grad_(False)",
            stacklevel=users_line(),
        )
    try:
        for param in strays:
            del optimizer.state[param]
        yield
    finally:
        optimizer.state.update(strays)


@contextlib.contextmanager
def undone_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put groups and state back where a load fails, and what it has filled into tensors of the groups."""
    groups, state = optimizer.param_groups, optimizer.state
    held = [group[key] for group in groups for key in _KINDS if isinstance(group[key], Tensor)]
    copies = [tensor.clone() for tensor in held]
    try:
        yield
    except BaseException:
        optimizer.param_groups, optimizer.state = groups, state
        for tensor, before in zip(held, copies, strict=True):
            tensor.copy_(before)
        raise


@contextlib.contextmanager
def through_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Translate a state after the user's hooks before loading, and restore dtypes before those after it."""
    before_load = [{key: group[key] for key in _KINDS} for group in optimizer.param_groups]
    loaded: list[StateDict] = []

    def before(_: torch.optim.Optimizer, saved: StateDict) -> StateDict:
        loaded.append(translated_state(saved, optimizer.param_groups))
        return loaded[0]

    def after(_: torch.optim.Optimizer) -> None:
        restore_states(loaded[0], optimizer)
        for key in ("lr", "weight_decay"):
            fill_tensors(key, optimizer.param_groups, [own[key] for own in before_load])
        for group, own in zip(optimizer.param_groups, before_load, strict=True):
            if not isinstance(own["lr"], Tensor):
                group["lr"] = float(group["lr"])

    handles = (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fill_tensors(key: str, groups: list[Group], own: list[float | Tensor]) -> None:
    """Put loaded rates or lambdas into the tensors that this optimizer was built with.

    Groups that share a tensor go on sharing it where their values are equal. A lambda that is the number 0 stays one:
    norm rules leave such a group alone, and a tensor may be anything.
    """
    filled: dict[tuple[int, float], Tensor] = {}
    taken: set[int] = set()
    for group, before in zip(groups, own, strict=True):
        if isinstance(before, Tensor) and (key == "lr" or decays(group)):
            value = float(group[key])
            tensor = torch.full_like(before, value) if id(before) in taken else before
            taken.add(id(before))
            group[key] = filled.setdefault((id(before), value), tensor).fill_(value)


def settle_peaks(optimizer: torch.optim.Optimizer, before: list[tuple[float, float]], saved: StateDict) -> None:
    """Warn of loaded peaks that surprise, and complete those that were not saved.

    `before` has the constructor's rate and the peak that each group was built for.
    """
    surprises: dict[str, list[str]] = {}
    for number, (group, own) in enumerate(zip(optimizer.param_groups, before, strict=True)):
        message = peak.surprise_after_load(*own, group) if rates.needs_peak(group) else None
        if message is not None:
            surprises.setdefault(message, []).append(label_of(group, number))
    if not any("highest_lr" in group for group in saved["param_groups"]):  # assume that the peak was reached
        for group in optimizer.param_groups:
            group["highest_lr"] = group["resolved_peak_lr"] or peak.expected_peak(group)
    for message, labels in surprises.items():
        warnings.warn(f"{', '.join(labels)}: {message}", PeakLRWarning, stacklevel=users_line())
