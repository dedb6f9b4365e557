"""The options of optimizers and param groups: which there are, their defaults, and what makes a value wrong."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypedDict

import torch
from torch import Tensor

from muonsw.addons.norm_rules import FREE, NORM_RULES
from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.base import MOMENTUM_FORMS
from muonsw.algorithms.muon import AURORA
from muonsw.algorithms.shampoo import GRAFTINGS
from muonsw.apply import ROUNDINGS
from muonsw.decay import DECAY_RULES, Points, validated_points
from muonsw.matrices import FLATTEN, SHAPE_SCALES, STACK
from muonsw.nonfinite import POLICIES
from muonsw.normalize import NORMALIZE, NORMALIZERS
from muonsw.normalize.normuon import LONGER, ROWS
from muonsw.orthogonalize import ORTHOGONALIZERS
from muonsw.orthogonalize.iterations import MOST_STEPS
from muonsw.peak import RUNNING_MAX
from muonsw.precision import AUTO, DTYPES, INT8, LOW_PRECISION, dtype_name
from muonsw.precondition import PRECONDITION, PRECONDITIONERS
from muonsw.registry import unknown
from muonsw.slots import EMPTY_SLOTS
from muonsw.text import listed, users_line
from muonsw.work import Group

Check = Callable[[Any], Any]


class GroupOptions(TypedDict, total=False):
    """Further options that mean the same for every algorithm, for all groups or for one.

    Attributes:
        total_steps: updates of the whole run, for rules that end with it.
        decay_points: (fraction of the run, multiple of weight_decay) for `decay="piecewise"`, linear between points.
        norm: what becomes of the norm of weights with decay: "free" (the default), "target" (decay pulls it to its
            target instead of zero), "hyperball" (it stays, nothing decays, and `lr` is the size of an update over
            that of the weight).
        target_norm: the root mean square of the entries that a norm rule aims at; None is what each weight has at the
            first step.
        cautious: decay only the entries that the update does not move outward.
        lr_multiplier: by how much this group's learning rate was multiplied, as under muP. A group that sets it and
            no `lr` gets `lr * lr_multiplier`.
        state_dtype: dtype of the optimizer state; "auto" is float32 for bfloat16 and float16 parameters, else the
            parameter's own; "bfloat16", and "int8" in 8 bits by block, are rounded stochastically.
        offload: keep state in pinned host memory, from which it is copied to the GPU and back beside the step; nothing
            is done for parameters on the CPU. Wait for the device before you read `optimizer.state` yourself.
        rounding: how bfloat16 and float16 weights are rounded: "stochastic", or "nearest", which loses decay and warns,
            and rounds state in less than float32 to nearest as well.
        rounding_seed: seed of the stochastic rounding.
        maximize: climb instead of descend.
        fused: False computes with torch's plain operations alone, to compare or to search for an error; None and True
            take fused kernels wherever there are some.
        role: a label for tables and telemetry.
    """

    total_steps: int | None
    decay_points: Points | None
    norm: str
    target_norm: float | None
    cautious: bool
    lr_multiplier: float
    state_dtype: torch.dtype | str
    offload: bool
    rounding: str
    rounding_seed: int
    maximize: bool
    fused: bool | None
    role: str | None


class MuonOptions(GroupOptions, total=False):
    """Options of the members of Muon's slots and of its orthogonalizer; None is the default.

    Attributes:
        precondition_beta2: decay rate of the averages of squared gradients.
        precondition_eps: added to their root, or the least root.
        precondition_frequency: steps from one change of bases to the next, of SOAP and Shampoo.
        precondition_max_dim: the longest side that SOAP rotates.
        aurora_iterations: calls of the orthogonalizer inside Aurora.
        aurora_beta: how far each of them corrects the lengths of rows.
        aurora_polar: the orthogonalizer inside.
        normalize_beta2: decay rate of the averages of squared directions.
        normalize_eps: added to their root.
        normalize_axis: what has an average of its own: "rows" (outputs), or "longer" (places along the longer axis).
        normalize_snap: set the norm of directions to sqrt(min(m, n)) first.
    """

    precondition_beta2: float | None
    precondition_eps: float | None
    precondition_frequency: int | None
    precondition_max_dim: int | None
    aurora_iterations: int | None
    aurora_beta: float | None
    aurora_polar: str | None
    normalize_beta2: float | None
    normalize_eps: float | None
    normalize_axis: str | None
    normalize_snap: bool | None


COMMON: Group = {
    "lr": 1e-3,
    "weight_decay": 0.1,
    "decay": "scaled",
    "cautious": False,
    "peak_lr": None,
    "peak": "group",
    "lr_multiplier": 1.0,
    "state_dtype": AUTO,
    "offload": False,
    "rounding": "stochastic",
    "rounding_seed": 0,
    "maximize": False,
    "fused": None,
    "role": None,
}

# Options that a group has only where they differ from these, whatever its algorithm; then those of rules of matrices,
# and those of Muon alone.
_OPTIONAL: Group = {"total_steps": None, "decay_points": None, "norm": FREE, "target_norm": None}
_OF_VIEWS: Group = {"matrix": None, "split_sizes": None, "split_dim": 0, "heads": None, "transposed": False}
_OF_MUON: Group = dict.fromkeys(("block_period", *AURORA, *PRECONDITION.option_names(), *NORMALIZE.option_names()))

# In every group, whatever its algorithm: OneCycleLR looks for one of the two in all groups.
_FOR_SCHEDULERS: Group = {"momentum": 0.0, "betas": (0.9, 0.95)}

# Kept by the optimizer itself in each group; not for the user to set, and saved with the rest.
BOOKKEEPING: Group = {
    "resolved_peak_lr": None,
    "peak_record": None,
    "constructor_lr": None,
    "highest_lr": None,
    "step_count": 0,
    "update_count": 0,
}

# Written into groups by schedulers and by other libraries, and near enough to an option of ours to be taken for a typo.
_KEYS_OF_OTHERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "lr_scale")

# Arguments of the constructor and of for_model that a group cannot have.
_OF_THE_WHOLE = ("nonfinite", "chunk_bytes", "replay", "process_group", "preset")

# Options of torch's optimizers that people will try, and what to do instead.
NOT_NEEDED = {
    "differentiable": "steps are not differentiable",
    "capturable": "capture forward and backward; small steps are replayed as CUDA graphs by themselves",
    "amsgrad": "AdamW here has no AMSGrad variant",
    "dampening": "use momentum_form='ema' for dampening equal to momentum",
    "decoupled_weight_decay": "decay is always decoupled",
    "adjust_lr_fn": "it is called scale here, with the same names, and spectral for spectral_unclamped",
    "ef_decay": "it is called momentum here",
    "ns_coefficients": "register an orthogonalizer with your coefficients and name it in orthogonalizer=",
}

# What else people call our options.
_ALIASES = {"wd": "weight_decay", "learning_rate": "lr", "beta1": "betas", "beta2": "betas", "epsilon": "eps"}


def algorithm_defaults(algorithm: str) -> Group:
    """Every option of a group with this algorithm, at its default."""
    return {**optional_defaults(algorithm), **COMMON, **_FOR_SCHEDULERS, **ALGORITHMS[algorithm].defaults}


def optional_defaults(algorithm: str) -> Group:
    """The options that a group with this algorithm has only where they are set."""
    of_muon = _OF_MUON if "precondition" in ALGORITHMS[algorithm].defaults else {}
    return {**_OPTIONAL, **_OF_VIEWS, **of_muon}


def prune(group: Group) -> None:
    """Remove options of other algorithms from a group, and optional ones that are at their defaults."""
    algorithm = group["algorithm"]
    own, optional = algorithm_defaults(algorithm), optional_defaults(algorithm)
    kept = ALGORITHMS[algorithm].defaults
    for key in [key for key in group if key in CHECKS and key not in ("algorithm", "foreach")]:
        if key not in own or (key in optional and key not in kept and group[key] == optional[key]):
            del group[key]


def completed(group: Group, defaults: Group) -> Group:
    """A group with its options validated, and the rest filled in from the constructor's.

    Options that mean the same everywhere come from the constructor; those of an algorithm only where the
    group uses the constructor's algorithm, else from that algorithm's own defaults; those of a member of a slot only
    where the group has the constructor's member.
    """
    for key in group.keys() - {"params", "param_names"}:
        if key in _OF_THE_WHOLE:
            raise ValueError(f"{key}={group[key]!r} is an optimizer-level argument; pass it to the constructor")
        group[key] = validate_option(key, group[key])
    algorithm = group["algorithm"] if "algorithm" in group else defaults["algorithm"]
    inherited = defaults if algorithm == defaults["algorithm"] else algorithm_defaults(algorithm)
    common = {key: defaults[key] for key in (*COMMON, *_OPTIONAL) if key in defaults}
    changed = [slot for slot in EMPTY_SLOTS if slot in group and group[slot] != inherited.get(slot)]
    unset = dict.fromkeys(key for slot in changed for key in inherited if key.startswith(f"{slot}_"))
    filled: Group = {**inherited, **unset, **common, **BOOKKEEPING, **group, "algorithm": algorithm}
    if "lr" not in group and filled["lr_multiplier"] != 1:  # what a group says of itself is its own
        filled["lr"] = filled["lr"] * filled["lr_multiplier"]
    if not BOOKKEEPING.keys() & group.keys():  # a group of another optimizer of ours has options of all kinds
        _refuse_in_group(group, filled)
    if filled.get("foreach") is False and not filled["fused"]:  # torch's third implementation: a loop over tensors
        raise ValueError("foreach=False: equal shapes are always one batch; leave it out, or say fused=True or False")
    if filled["constructor_lr"] is None:
        filled["constructor_lr"] = float(filled["lr"])
    return filled


def validate_option(key: str, value: Any) -> Any:
    """The value as a group stores it, or an error that names the option and what it takes.

    A key that is no option of ours is kept, as torch keeps it: frameworks write names, scales and hints into groups.
    Refused are only a misspelt option, and an option of torch's that asks for something else than is done here.
    """
    check = CHECKS.get(key)
    if check is None:
        if key in NOT_NEEDED and value:
            raise ValueError(f"{key!r} is not an option: {NOT_NEEDED[key]}")
        if key in _ALIASES or _looks_misspelt(key):
            raise ValueError(unknown_option(key, CHECKS))
        return value
    return _checked(key, value, check)


def _checked(key: str, value: Any, check: Check) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{key}={value!r}: {error}") from None


def require_number(key: str, value: Any) -> None:
    """Refuse an argument that is neither a number nor a tensor, with its name; which numbers it takes is not asked."""
    if not isinstance(value, Real | Tensor):
        raise ValueError(f"{key}={value!r}: must be a number")


def require_whole(key: str, value: Any, low: int, high: float = math.inf) -> None:
    """Refuse an argument that is no whole number from `low` to `high`, with its name."""
    _checked(key, value, _whole(low, high))


def unknown_option(key: str, known: Iterable[str], kind: str = "option") -> str:
    """The message for a key that is no option: what was probably meant, or else all options that there are."""
    options = sorted(known)
    close = [_ALIASES[key]] if key in _ALIASES else difflib.get_close_matches(key, options, n=1)
    return f"unknown {kind} {key!r} (did you mean {close[0]!r}?)" if close else unknown(kind, key, options)


def _looks_misspelt(key: str) -> bool:
    """Whether a key is one or two letters away from an option; a longer name is a name of its own."""
    if key in _KEYS_OF_OTHERS or key in BOOKKEEPING or _owners(key):
        return False
    close = difflib.get_close_matches(key, list(CHECKS), n=1, cutoff=0.8)
    return bool(close) and abs(len(close[0]) - len(key)) <= 2


def refuse_model(params: Any, optimizer: str) -> None:
    """Refuse a model where its parameters are expected."""
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"{optimizer} takes parameters, not a model; call {optimizer}.for_model(model, lr=...), which gives each "
            f"parameter the algorithm that suits it"
        )


def require_model(model: Any, caller: str) -> None:
    """Refuse parameters, a state or an optimizer where the model is expected, whose modules tell roles."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{caller} takes the model itself, a torch.nn.Module, not a {type(model).__name__}: roles come from its "
            f"modules; pass model, not model.parameters(), and several models as one torch.nn.ModuleList"
        )


def refuse_settings(nonfinite: str, chunk_bytes: int | None, replay: bool | None, process_group: Any) -> None:
    """Refuse settings of a whole optimizer that mean nothing."""
    if nonfinite not in POLICIES:
        raise ValueError(f"nonfinite={nonfinite!r}: must be one of {', '.join(map(repr, POLICIES))}")
    for key, value, check in (("chunk_bytes", chunk_bytes, _whole(1)), ("replay", replay, _flag)):
        try:
            _optional(check)(value)
        except ValueError as error:
            raise ValueError(f"{key}={value!r}: {error}, or None for the default") from None
    if replay and process_group is not None:
        raise ValueError("replay=True captures no step that talks to other ranks; leave out process_group or replay")


def refuse_options_of_others(options: Group, algorithm: str) -> None:
    """A constructor's options must mean something to its algorithm; those of another belong in a group."""
    known = algorithm_defaults(algorithm).keys() - _FOR_SCHEDULERS.keys() | ALGORITHMS[algorithm].defaults.keys()
    known |= {"foreach", *NOT_NEEDED}
    for key in options:
        if key == "preset":
            raise ValueError(f"preset={options[key]!r} is an option of for_model, which routes a whole model")
        if key == "algorithm":
            raise ValueError(f"algorithm={options[key]!r} is an option of for_model and of a param group")
        if key not in known:
            owners = _owners(key)
            if not owners:
                raise ValueError(unknown_option(key, known - NOT_NEEDED.keys()))
            raise ValueError(
                f"{key!r} is an option of {listed(owners)}, not of {algorithm}; set it in a param "
                f"group with that algorithm, or in for_model with adamw={{...}} or patterns={{...}}"
            )


def _refuse_in_group(given: Group, filled: Group) -> None:
    """Refuse options of a group that its algorithm does not have, such as AdamW's betas where it was not named.

    Norm rules read how any weight is seen as matrices, and one decay rule reads betas. `momentum` is let through: loops
    that warm it up give it to all groups.
    """
    algorithm, rule = filled["algorithm"], DECAY_RULES[filled["decay"]]
    known = algorithm_defaults(algorithm).keys() - ({"betas"} if not rule.uses_gradient else set())
    known |= ALGORITHMS[algorithm].defaults.keys()
    for key in [key for key in given if key not in known and _owners(key)]:
        raise ValueError(
            f"{key!r} is an option of {listed(_owners(key))}, and this group has algorithm={algorithm!r}; leave it "
            f"out, or name its algorithm in the group"
        )


def _owners(key: str) -> list[str]:
    """The algorithms that have an option."""
    if key in _OF_VIEWS:
        return [name for name, entry in ALGORITHMS.items() if entry.matrices is not None]
    wanted = "precondition" if key in _OF_MUON else key
    return [name for name, entry in ALGORITHMS.items() if wanted in entry.defaults]


def differing_options(left: Group, right: Group, ignored: Iterable[str] = ()) -> dict[str, tuple[Any, Any]]:
    """What two groups hold under the keys in which they differ; of tensors it is their numbers."""
    keys = sorted((left.keys() | right.keys()) - set(ignored))
    unequal = [key for key in keys if left.get(key) is not right.get(key)]
    pairs = {key: (_plain(left.get(key)), _plain(right.get(key))) for key in unequal}
    return {key: (a, b) for key, (a, b) in pairs.items() if a != b}


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value


def refuse_parameter(name: str, param: Tensor) -> None:
    """Refuse what no algorithm here can optimize: integers, complex and 8-bit numbers, flat and expanded weights."""
    if not param.is_floating_point():
        raise ValueError(f"{name} has dtype {param.dtype}; only real floating-point parameters can be optimized")
    if param.dtype not in DTYPES.values():
        raise ValueError(
            f"{name} has dtype {param.dtype}, too coarse to take updates in; optimize a copy of it in bfloat16 or "
            f"float32, from which the {str(param.dtype).removeprefix('torch.')} weight is made"
        )
    if any(size > 1 and not stride for size, stride in zip(param.shape, param.stride(), strict=True)):
        raise ValueError(f"{name} is expanded: several of its elements are one in memory; optimize what was expanded")
    if getattr(param, "_is_flat_param", False):
        raise ValueError(
            f"{name} is a flattened parameter of FullyShardedDataParallel, in which matrices are no longer matrices; "
            f"use fully_shard (FSDP2) or DistributedDataParallel instead"
        )


def require_alike_names(group: Group, others: Sequence[Group], label: str) -> None:
    """Refuse parameters without names beside named ones, and the other way round: states follow names or places."""
    if not isinstance(group["params"], Tensor | set):  # torch takes the one, and refuses the other
        group["params"] = list(group["params"])
    named = "param_names" in group or any(isinstance(entry, tuple) for entry in group["params"])
    if others and named != ("param_names" in others[0]):
        wanted = "[parameter, ...] without names" if named else "[('name', parameter), ...]"
        raise ValueError(
            f"{label} has parameters {'with' if named else 'without'} names, unlike those of the groups before it; "
            f"write {{'params': {wanted}}}{'' if named else ', such as list(module.named_parameters())'}"
        )


def warn_of_rounding(group: Group) -> None:
    """Warn of low-precision weights that are rounded to the nearest number."""
    if group["rounding"] == "nearest" and any(p.dtype in LOW_PRECISION for p in group["params"]):
        warnings.warn(
            "rounding='nearest' loses decay and small updates of low-precision weights; use 'stochastic'",
            stacklevel=users_line(),
        )


def _number(low: float, high: float = math.inf, *, open_end: bool = False) -> Check:
    def check(given: Any) -> float:
        if isinstance(given, bool) or not isinstance(given, Real):  # numpy's numbers are Real too
            raise ValueError("must be a number")
        value = float(given)
        if high == math.inf and not (math.isfinite(value) and value >= low):
            raise ValueError(f"must be a finite number of at least {low:g}")
        if not low <= value <= high or (open_end and value == high):
            raise ValueError(f"must be in [{low:g}, {high:g}{')' if open_end else ']'}")
        return value

    return check


def _number_or_tensor(value: Any) -> float | Tensor:
    if not isinstance(value, Tensor):
        return float(_number(0.0)(value))
    if value.numel() != 1 or value.dim() > 1 or not value.is_floating_point():
        raise ValueError("a tensor must hold one floating-point number")
    if value.device.type == "cpu":
        _number(0.0)(value.item())
    return value


def _whole(low: int, high: float = math.inf) -> Check:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
            raise ValueError(f"must be a whole number of at least {low}")
        if int(value) > high:
            raise ValueError(f"must be at most {high}")
        return int(value)

    return check


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be True or False")
    return value


def _one_of(*names: str | None) -> Check:
    def check(value: Any) -> Any:
        if value not in names:
            raise ValueError("must be one of " + ", ".join(map(repr, names)))
        return value

    return check


def _known(table: Any) -> Check:
    def check(name: Any) -> Any:
        if not isinstance(name, str):
            raise ValueError(f"must be one of {', '.join(map(repr, table))}")
        table[name]
        return name

    return check


def _fraction(value: Any) -> float:
    fraction = float(_number(0.0)(value))
    if not 0 < fraction <= 1:
        raise ValueError("must be in (0, 1]")
    return fraction


def _polar(name: Any) -> Any:
    if name == "aurora":
        raise ValueError("is the orthogonalizer inside Aurora; leave it out for that of its authors, 'simple_quintic'")
    return _known(ORTHOGONALIZERS)(name)


def _dtype(*more: str) -> Check:
    names = (*DTYPES, *more)

    def check(value: Any) -> str:
        name = dtype_name(value) if isinstance(value, str | torch.dtype) else ""
        if name != AUTO and name not in names:
            raise ValueError(f"must be 'auto' or one of {', '.join(names)}")
        return name

    return check


def _peak_lr(value: Any) -> Any:
    if value is None or value == RUNNING_MAX:
        return value
    if isinstance(value, Tensor | str):
        raise ValueError("must be a float, None or 'running_max'; a peak is read by the host")
    if value == 0:
        raise ValueError("a peak of zero would mean no decay for ever; leave it out to have it found, or give the peak")
    return float(_number(0.0)(value))


def _two(check: Check) -> Check:
    def check_both(value: Any) -> tuple[Any, Any]:
        if not isinstance(value, tuple | list) or len(value) != 2:
            raise ValueError("must be two numbers")
        return check(value[0]), check(value[1])

    return check_both


def _split_sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | list) or not value:
        raise ValueError("must be None or a sequence of whole numbers")
    return tuple(_whole(1)(size) for size in value)


def _target_norm(value: Any) -> float:
    norm = float(_number(0.0)(value))
    if norm == 0:
        raise ValueError("a norm of zero is what decay aims at; leave norm='free'")
    return norm


def _role(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string or None")
    return value


CHECKS: dict[str, Check] = {
    "algorithm": _known(ALGORITHMS),
    "lr": _number_or_tensor,
    "weight_decay": _number_or_tensor,
    "decay": _known(DECAY_RULES),
    "total_steps": _optional(_whole(1)),
    "decay_points": _optional(validated_points),
    "norm": _known(NORM_RULES),
    "target_norm": _optional(_target_norm),
    "cautious": _flag,
    "peak_lr": _peak_lr,
    "peak": _one_of("group", "base"),
    "lr_multiplier": _number(1e-30),
    "state_dtype": _dtype(INT8),
    "offload": _flag,
    "rounding": _one_of(*ROUNDINGS),
    "rounding_seed": _whole(0),
    "maximize": _flag,
    "fused": _optional(_flag),
    "foreach": _optional(_flag),
    "role": _optional(_role),
    "momentum": _number(0.0, 1.0, open_end=True),
    "momentum_form": _one_of(*MOMENTUM_FORMS),
    "nesterov": _flag,
    "betas": _two(_number(0.0, 1.0, open_end=True)),
    "eps": _number(0.0),
    "shampoo_beta": _optional(_number(0.0, 1.0)),
    "block_size": _whole(1),
    "grafting": _one_of(*GRAFTINGS),
    "grafting_eps": _number(0.0),
    "orthogonalizer": _known(ORTHOGONALIZERS),
    "ns_steps": _optional(_whole(1, MOST_STEPS)),
    "ns_dtype": _dtype(),
    "fraction": _fraction,
    "block_period": _optional(_whole(1)),
    "aurora_iterations": _optional(_whole(1, MOST_STEPS)),
    "aurora_beta": _optional(_number(0.0)),
    "aurora_polar": _optional(_polar),
    "scale": _known(SHAPE_SCALES),
    "precondition": _optional(_known(PRECONDITIONERS)),
    "normalize": _optional(_known(NORMALIZERS)),
    "normalize_beta2": _optional(_number(0.0, 1.0, open_end=True)),
    "normalize_eps": _optional(_number(0.0)),
    "normalize_axis": _one_of(None, ROWS, LONGER),
    "normalize_snap": _optional(_flag),
    "precondition_beta2": _optional(_number(0.0, 1.0, open_end=True)),
    "precondition_eps": _optional(_number(0.0)),
    "precondition_max_dim": _optional(_whole(1)),
    "precondition_frequency": _optional(_whole(1)),
    "matrix": _one_of(None, STACK, FLATTEN),
    "split_sizes": _optional(_split_sizes),
    "split_dim": _one_of(0, 1),  # type: ignore[arg-type]
    "transposed": _flag,
    "heads": _optional(_whole(1)),
}
