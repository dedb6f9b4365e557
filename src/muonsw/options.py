"""Every option of optimizers and param groups, with its default and its check."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any, TypedDict

import torch
from torch import Tensor

from muonsw.addons.norm_rules import FREE, NORM_RULES
from muonsw.algorithms import ALGORITHMS
from muonsw.decay import DECAY_RULES
from muonsw.matrices import FLATTEN, SHAPE_SCALES, STACK
from muonsw.orthogonalize import ORTHOGONALIZERS
from muonsw.orthogonalize.iterations import MOST_STEPS
from muonsw.peak import RUNNING_MAX
from muonsw.precision import AUTO, DTYPES, INT8
from muonsw.registry import Registry, unknown
from muonsw.slots import AXES, EMPTY_SLOTS, NORMALIZE, NORMALIZERS, PRECONDITION, PRECONDITIONERS
from muonsw.text import listed
from muonsw.work import Group

Check = Callable[[Any], Any]


class GroupOptions(TypedDict, total=False):
    """Further options that all algorithms share, for all groups or for one."""

    total_steps: int | None
    """steps of the whole run, for rules that depend on its length."""
    norm: str
    """how weights with decay control their norm: "free" (the default), "target" (decay pulls it to a target instead of
    zero), "hyperball" (constant norm, no decay, and `lr` is the norm of an update relative to that of the weight).
    """
    target_norm: float | None
    """the root mean square of the elements that a norm rule aims at; None: that of each weight at the first step."""
    cautious: bool
    """decay only the elements that the update does not move away from zero."""
    lr_multiplier: float
    """the factor in this group's learning rate, as under muP. A group that sets it without `lr` gets
    `lr * lr_multiplier`."""
    state_dtype: torch.dtype | str
    """dtype of the optimizer state; "auto" is float32 for bfloat16 and float16 parameters, else the parameter's own;
    "bfloat16" and "int8" (8 bits in blocks) are rounded stochastically."""
    offload: bool
    """keep state in pinned host memory and copy it to the GPU and back during the step; no effect on CPU parameters.
    Synchronize the device before you read `optimizer.state` yourself."""
    maximize: bool
    """maximize the objective instead of minimizing it."""
    fused: bool | None
    """False uses only torch's plain operations, to compare or debug; None and True use fused kernels if available."""
    role: str | None
    """a label for tables and telemetry."""


class MuonOptions(GroupOptions, total=False):
    """Options of Muon's preconditioners and normalizers; None is the default."""

    precondition_beta2: float | None
    """decay rate of the averages of squared gradients."""
    precondition_eps: float | None
    """added to their root, or a lower bound of it."""
    precondition_frequency: int | None
    """steps between updates of the bases, for SOAP and Shampoo."""
    precondition_max_dim: int | None
    """the longest side of a matrix that SOAP rotates."""
    normalize_beta2: float | None
    """decay rate of the averages of squared directions."""
    normalize_eps: float | None
    """added to their root."""
    normalize_axis: str | None
    """the axis with separate averages: "rows" (outputs), or "longer" (the longer axis)."""
    normalize_snap: bool | None
    """first set the norm of directions to sqrt(min(m, n))."""


# checks: each returns the value as a group stores it, or raises the end of the message "lr=-1: must be ..."


def _check(what: str, accepts: Callable[[Any], bool], stored: Check = lambda value: value) -> Check:
    def check(value: Any) -> Any:
        if not accepts(value):
            raise ValueError(f"must be {what}")
        return stored(value)

    return check


def _number(low: float = 0.0, high: float = math.inf, *, above: bool = False, below: bool = False) -> Check:
    """A number from `low` to `high`; `above` and `below` exclude the ends."""

    def accepts(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, Real):  # numpy's numbers are Real too
            return False
        x = float(value)
        return math.isfinite(x) and (low < x if above else low <= x) and (x < high if below else x <= high)

    if high == math.inf:
        return _check(f"a finite number {'above' if above else 'of at least'} {low:g}", accepts, float)
    return _check(f"in {'(' if above else '['}{low:g}, {high:g}{')' if below else ']'}", accepts, float)


def _number_or_tensor(value: Any) -> float | Tensor:
    if not isinstance(value, Tensor):
        return float(_number()(value))
    if value.numel() != 1 or value.dim() > 1 or not value.is_floating_point():
        raise ValueError("a tensor must hold one floating-point number")
    if value.device.type == "cpu":
        _number()(value.item())
    return value


def _whole(low: int, high: float = math.inf) -> Check:
    def accepts(value: Any) -> bool:
        return not isinstance(value, bool) and isinstance(value, Integral) and low <= int(value) <= high

    most = "" if high == math.inf else f" and at most {high}"
    return _check(f"a whole number of at least {low}{most}", accepts, int)


def _one_of(*values: Any) -> Check:
    return _check("one of " + ", ".join(map(repr, values)), lambda value: value in values)


def _name_in(table: Registry[Any]) -> Check:
    def check(name: Any) -> str:
        table[str(name)]  # raises for an unknown name
        return str(name)

    return check


def _dtype(*names: str) -> Check:
    def stored(value: Any) -> str:
        return str(value).removeprefix("torch.")

    return _check(f"one of {', '.join(names)}", lambda value: stored(value) in names, stored)


def _sequence(of: Check, what: str, length: int | None = None) -> Check:
    def accepts(value: Any) -> bool:
        return isinstance(value, tuple | list) and bool(value) and length in (None, len(value))

    return _check(what, accepts, lambda value: tuple(map(of, value)))


def _or_none(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _peak_lr(value: Any) -> Any:
    if value is None or value == RUNNING_MAX:
        return value
    if not isinstance(value, Real):
        raise ValueError("must be a float, None or 'running_max'")
    return _number(above=True)(value)


_flag = _check("True or False", lambda value: isinstance(value, bool))
_fraction = _number(0, 1, below=True)

# Options of every param group: default and check.
_COMMON: dict[str, tuple[Any, Check]] = {
    "lr": (1e-3, _number_or_tensor),
    "weight_decay": (0.1, _number_or_tensor),
    "decay": ("scaled", _name_in(DECAY_RULES)),
    "cautious": (False, _flag),
    "peak_lr": (None, _peak_lr),
    "peak": ("group", _one_of("group", "base")),
    "lr_multiplier": (1.0, _number(1e-30)),
    "state_dtype": (AUTO, _dtype(AUTO, "float64", "float32", "bfloat16", INT8)),
    "offload": (False, _flag),
    "maximize": (False, _flag),
    "fused": (None, _or_none(_flag)),
    "role": (None, _or_none(_check("a string", lambda value: isinstance(value, str)))),
}

# Options that a group stores only if they differ from these defaults: common, of matrix views, of Muon.
_OPTIONAL: dict[str, tuple[Any, Check]] = {
    "total_steps": (None, _or_none(_whole(1))),
    "norm": (FREE, _name_in(NORM_RULES)),
    "target_norm": (None, _or_none(_number(above=True))),
}
_VIEW_OPTIONS: dict[str, tuple[Any, Check]] = {
    "matrix": (None, _one_of(None, STACK, FLATTEN)),
    "split_sizes": (None, _or_none(_sequence(_whole(1), "a sequence of whole numbers"))),
    "split_dim": (0, _one_of(0, 1)),
    "heads": (None, _or_none(_whole(1))),
    "transposed": (False, _flag),
}
_MUON_OPTIONS: Group = dict.fromkeys(("block_period", *PRECONDITION.option_names(), *NORMALIZE.option_names()))
OPTIONAL = frozenset({*_OPTIONAL, *_VIEW_OPTIONS, *_MUON_OPTIONS})

COMMON: Group = {key: default for key, (default, _) in _COMMON.items()}

# In every group, whatever its algorithm, because OneCycleLR cycles one of the two in all groups.
_FOR_SCHEDULERS: Group = {"momentum": 0.0, "betas": (0.9, 0.95)}

# Bookkeeping that the optimizer stores in each group and saves; users do not set it.
BOOKKEEPING: Group = {
    "resolved_peak_lr": None,
    "peak_record": None,
    "constructor_lr": None,
    "highest_lr": None,
    "step_count": 0,
    "update_count": 0,
}

# Options of a whole optimizer.
SETTINGS = ("nonfinite", "chunk_bytes", "replay")

# The checks of all options; the defaults of algorithms are in their files.
CHECKS: dict[str, Check] = {
    **{key: check for options in (_COMMON, _OPTIONAL, _VIEW_OPTIONS) for key, (_, check) in options.items()},
    "algorithm": _name_in(ALGORITHMS),
    "foreach": _or_none(_flag),  # torch's, without effect: equal shapes are always batched
    "momentum": _fraction,
    "momentum_form": _one_of("ema", "heavy_ball"),
    "nesterov": _flag,
    "betas": _sequence(_fraction, "two numbers", 2),
    "eps": _number(),
    "shampoo_beta": _or_none(_number(0, 1)),
    "block_size": _whole(1),
    "grafting": _one_of(None, "adam", "sgd"),
    "grafting_eps": _number(),
    "orthogonalizer": _name_in(ORTHOGONALIZERS),
    "ns_steps": _or_none(_whole(1, MOST_STEPS)),
    "ns_dtype": _dtype(AUTO, *DTYPES),
    "fraction": _number(0, 1, above=True),
    "block_period": _or_none(_whole(1)),
    "scale": _name_in(SHAPE_SCALES),
    "precondition": _or_none(_name_in(PRECONDITIONERS)),
    "precondition_beta2": _or_none(_fraction),
    "precondition_eps": _or_none(_number()),
    "precondition_max_dim": _or_none(_whole(1)),
    "precondition_frequency": _or_none(_whole(1)),
    "normalize": _or_none(_name_in(NORMALIZERS)),
    "normalize_beta2": _or_none(_fraction),
    "normalize_eps": _or_none(_number()),
    "normalize_axis": _one_of(None, *AXES),
    "normalize_snap": _or_none(_flag),
    "nonfinite": _one_of("skip", "raise", "propagate"),
    "chunk_bytes": _or_none(_whole(1)),
    "replay": _or_none(_flag),
}

# Options of earlier versions that saved groups may hold, and what to do instead.
REMOVED = dict.fromkeys(
    ("aurora_iterations", "aurora_beta", "aurora_polar"),
    "register functools.partial(muonsw.orthogonalize.aurora, ...) and name it in orthogonalizer=",
)

# Other libraries' names for our options, and what to do instead of their other options.
_SYNONYMS = {"wd": "weight_decay", "learning_rate": "lr", "epsilon": "eps", "use_muon": "algorithm"}
_INSTEAD = {
    "rounding": "low-precision weights and state are always rounded stochastically",
    "preset": "pass it to for_model, which routes a whole model",
    "differentiable": "steps are not differentiable",
    "capturable": "capture only forward and backward; small steps replay as CUDA graphs automatically",
    "amsgrad": "AdamW here has no AMSGrad variant",
    "dampening": "use momentum_form='ema' for dampening equal to momentum",
    "adjust_lr_fn": "it is called scale here, with the same values, except that spectral_unclamped is spectral",
    "ns_coefficients": "register an orthogonalizer with your coefficients and name it in orthogonalizer=",
    **REMOVED,
}


def validate_option(key: str, value: Any) -> Any:
    """Return the value as a group stores it, or raise an error with the option and its valid values.

    Unknown keys pass, as in torch, because frameworks write names, scales and hints into groups. Only misspelt options
    and unsupported options of torch are errors.
    """
    if key in CHECKS:
        return _checked(key, value, CHECKS[key])
    if key in _INSTEAD:
        if value:
            raise ValueError(f"{key!r} is not an option: {_INSTEAD[key]}")
        return value
    close = [] if _owners(key) else difflib.get_close_matches(key, list(CHECKS), n=1, cutoff=0.8)
    meant = _SYNONYMS.get(key, *close)
    if key in _SYNONYMS or (close and abs(len(close[0]) - len(key)) <= 2):  # a much longer name is no typo
        raise ValueError(f"unknown option {key!r} (did you mean {meant!r}?)")
    return value


def _checked(key: str, value: Any, check: Check) -> Any:
    try:
        return check(value)
    except ValueError as error:
        raise ValueError(f"{key}={value!r}: {error}") from None


def require_number(key: str, value: Any, low: float = 0.0, high: float = math.inf, *, open_ends: bool = False) -> None:
    _checked(key, value, _number(low, high, above=open_ends, below=open_ends))


def require_whole(key: str, value: Any, low: int, high: float = math.inf) -> None:
    _checked(key, value, _whole(low, high))


def require_model(model: Any, caller: str) -> None:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"{caller} takes the model itself, not a {type(model).__name__}, because it reads roles from modules. Pass "
            f"model, not model.parameters(); put several models into one torch.nn.ModuleList"
        )


def refuse_parameter(name: str, param: Tensor) -> None:
    """Refuse what no algorithm can optimize: integer, complex, 8-bit, flattened and expanded parameters."""
    if param.dtype not in DTYPES.values():
        raise ValueError(
            f"{name} has dtype {param.dtype}; weights must be one of {', '.join(DTYPES)}. Optimize a copy of quantized "
            f"weights in bfloat16 or float32"
        )
    if any(size > 1 and not stride for size, stride in zip(param.shape, param.stride(), strict=True)):
        raise ValueError(f"{name} is expanded, so elements share memory; optimize the tensor that was expanded")
    if getattr(param, "_is_flat_param", False):
        raise ValueError(
            f"{name} is a flattened parameter of FullyShardedDataParallel, which hides its matrices; "
            f"use fully_shard (FSDP2) or DistributedDataParallel instead"
        )


# which options a group has


def options_of(algorithm: str) -> Group:
    """The options that an algorithm reads and others do not, with their defaults."""
    entry = ALGORITHMS[algorithm]
    views = {key: default for key, (default, _) in _VIEW_OPTIONS.items()} if entry.matrices is not None else {}
    return {**views, **(_MUON_OPTIONS if "precondition" in entry.defaults else {}), **entry.defaults}


def algorithm_defaults(algorithm: str) -> Group:
    optional = {key: default for key, (default, _) in (_OPTIONAL | _VIEW_OPTIONS).items()}  # norm rules also read views
    return {**optional, **COMMON, **_FOR_SCHEDULERS, **options_of(algorithm)}


def prune(group: Group) -> None:
    """Remove options of other algorithms, and optional ones at their defaults."""
    known, required = algorithm_defaults(group["algorithm"]), ALGORITHMS[group["algorithm"]].defaults
    optional = OPTIONAL - required.keys()
    for key in (CHECKS.keys() & group.keys()) - {"algorithm"}:
        if key not in known or (key in optional and group[key] == known[key]):
            del group[key]


def constructor_defaults(options: Group, algorithm: str) -> Group:
    checked = {key: validate_option(key, value) for key, value in options.items()}
    if "algorithm" in checked:
        raise ValueError(f"algorithm={checked['algorithm']!r} is an option of for_model and of a param group")
    refuse_options_of_others(checked, algorithm)
    known = algorithm_defaults(algorithm)
    for key in checked:
        if key not in (*known, *_INSTEAD, "foreach"):
            raise ValueError(unknown("option", key, sorted(known)))
    defaults = {**known, "algorithm": algorithm, **BOOKKEEPING, **checked}
    prune(defaults)
    return defaults


def complete_group(group: Group, defaults: Group) -> Group:
    """Validate a group's options and fill in the rest.

    Common options come from the constructor. So do those of the algorithm if it is the constructor's; otherwise they
    come from the algorithm's defaults. A group with another preconditioner or normalizer does not inherit its options.
    """
    for key in group.keys() - {"params", "param_names"}:
        if key in (*SETTINGS, "process_group"):
            raise ValueError(f"{key}={group[key]!r} is an optimizer-level argument; pass it to the constructor")
        group[key] = validate_option(key, group[key])
    algorithm = group.get("algorithm") or defaults["algorithm"]
    inherited = defaults if algorithm == defaults["algorithm"] else algorithm_defaults(algorithm)
    common = {key: defaults[key] for key in (*COMMON, *_OPTIONAL) if key in defaults}
    changed = [slot for slot in EMPTY_SLOTS if slot in group and group[slot] != inherited.get(slot)]
    unset = dict.fromkeys(key for slot in changed for key in inherited if key.startswith(f"{slot}_"))
    filled: Group = {**inherited, **unset, **common, **BOOKKEEPING, **group, "algorithm": algorithm}
    if "lr" not in group and filled["lr_multiplier"] != 1:  # an explicit rate is never multiplied
        filled["lr"] = filled["lr"] * filled["lr_multiplier"]
    if not BOOKKEEPING.keys() & group.keys():  # groups of our optimizers have momentum and betas
        # loops that warm up momentum set it in all groups, and one decay rule reads betas
        allowed = _FOR_SCHEDULERS if DECAY_RULES[filled["decay"]].uses_gradient else ("momentum",)
        refuse_options_of_others(group, algorithm, allowed)
    if filled["constructor_lr"] is None:
        filled["constructor_lr"] = float(filled["lr"])
    return filled


def refuse_options_of_others(keys: Iterable[str], algorithm: str, allowed: Iterable[str] = ()) -> None:
    known = {*options_of(algorithm), *_VIEW_OPTIONS, *allowed}
    for key in keys:
        if key not in known and (owners := _owners(key)):
            raise ValueError(
                f"{key!r} is an option of {listed(owners)}, not of {algorithm}; set it in a param group with that "
                f"algorithm, or in for_model with adamw={{...}} or patterns={{...}}"
            )


def _owners(key: str) -> list[str]:
    return [name for name in ALGORITHMS if key in options_of(name)]
