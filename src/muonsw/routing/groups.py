"""Param groups for a whole model: the role of each parameter, what patterns say, and one group for each outcome."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter

from muonsw.algorithms import ALGORITHMS
from muonsw.options import COMMON, unknown_option, validate_option
from muonsw.routing.names import aliases
from muonsw.routing.roles import MATRIX_ROLES, ROLES, RoutedParameter, classify
from muonsw.text import users_line
from muonsw.work import Group

ROLE_PREFIX = "role:"
ADAMW = "adamw"


class Routing(NamedTuple):
    """Param groups, matrices first, and the reason for each parameter's role by its name."""

    groups: list[Group]
    reasons: dict[str, str]


def route(model: nn.Module, algorithm: str, *, patterns: dict[str, Group], adamw: Group) -> Routing:
    """Param groups for a model, one for each set of options that its parameters end up with."""
    check_adamw(adamw)
    _require_options("patterns", patterns)
    for key, options in patterns.items():
        _require_options(f"patterns[{key!r}]", options)
    _refuse_shapeless(model)
    routed = list(classify(model))
    if not routed:
        raise ValueError("the model has no parameter that requires a gradient")
    chosen = {entry.name: _first_match(patterns, entry) for entry in routed}
    found: list[tuple[Group, list[tuple[str, Tensor]]]] = []
    adamw_used = False
    for entry in routed:
        pattern = patterns.get(chosen[entry.name] or "", {})
        takes_adamw = _takes_adamw(entry, algorithm, pattern)
        adamw_used |= takes_adamw
        options = _role_options(entry, algorithm, pattern) | (adamw if takes_adamw else {}) | pattern
        members = next((members for other, members in found if _same(other, options)), None)
        if members is None:
            found.append((options, members := []))
        members.append((entry.name, entry.param))
    groups = [{**options, "params": members} for options, members in found]
    ordered = sorted(groups, key=lambda group: group["role"] not in MATRIX_ROLES)
    _name(ordered)
    _refuse_unused(patterns, set(chosen.values()), routed)
    _refuse_idle(adamw, adamw_used)
    if _needs_matrices(algorithm):
        _warn_without_matrices(ordered)
    return Routing(ordered, {entry.name: _reason(entry, chosen[entry.name]) for entry in routed})


def _same(one: Group, other: Group) -> bool:
    """Whether two sets of options are equal; a tensor equals itself alone, as each may be filled with another rate."""
    return one.keys() == other.keys() and all(
        value is other[key] if isinstance(value, Tensor) or isinstance(other[key], Tensor) else value == other[key]
        for key, value in one.items()
    )


def _name(groups: list[Group]) -> None:
    """Give each group a `name` that no other has, for loggers: its role, or what a pattern calls it.

    Several groups of one name are numbered in their order, which follows from model and options alone.
    """
    taken: set[str] = set()
    for group in groups:
        wanted = str(group.get("name") or group["role"])
        numbered = (f"{wanted}-{number}" for number in count(2))
        group["name"] = wanted if wanted not in taken else next(name for name in numbered if name not in taken)
        taken.add(group["name"])


def _refuse_shapeless(model: nn.Module) -> None:
    """Refuse parameters that have no shape yet, and those that FSDP1 has laid out as vectors."""
    for name, param in model.named_parameters():
        path, _, own = name.rpartition(".")
        if isinstance(param, UninitializedParameter):
            raise ValueError(f"{name} has no shape yet; run one batch through the model before for_model")
        sized = isinstance(model.get_submodule(path), nn.Linear | nn.Embedding | _ConvNd)
        piece = sized and own == "weight" and param.dim() < 2
        if piece or own == "_flat_param" or type(param).__name__ == "FlatParameter":
            raise ValueError(
                f"{name} has been flattened to a vector, as FullyShardedDataParallel (FSDP1) does; no matrix can be "
                f"seen in it any more, and every weight would get AdamW without decay. Shard with "
                f"torch.distributed.fsdp.fully_shard (FSDP2), which keeps shapes, or use DistributedDataParallel"
            )


def _role_options(entry: RoutedParameter, algorithm: str, pattern: Group) -> Group:
    """What the role gives: an algorithm, no decay outside matrices, and the matrix view where one is needed."""
    usual = _usual_algorithm(entry, algorithm)
    options: Group = {"role": entry.role, "algorithm": usual}
    if not entry.decayed:
        options["weight_decay"] = 0.0
    if entry.role in MATRIX_ROLES or _needs_matrices(pattern.get("algorithm", usual)):
        options |= {"matrix": None, **entry.view}
    return options


def _usual_algorithm(entry: RoutedParameter, algorithm: str) -> str:
    return ADAMW if _needs_matrices(algorithm) and entry.role not in MATRIX_ROLES else algorithm


def _needs_matrices(algorithm: str) -> bool:
    return ALGORITHMS[algorithm].matrices is not None


def _takes_adamw(entry: RoutedParameter, algorithm: str, pattern: Group) -> bool:
    """Whether the options for AdamW apply: to what ends there, except the matrices of AdamW's own class."""
    final = pattern.get("algorithm", _usual_algorithm(entry, algorithm))
    return final == ADAMW and not (algorithm == ADAMW and entry.role in MATRIX_ROLES)


def patterns_within(model: nn.Module, patterns: dict[str, Group]) -> dict[str, Group]:
    """Those patterns that match something here; of one stage of a pipeline not all of them need to."""
    routed = list(classify(model))
    return {key: options for key, options in patterns.items() if any(_matches(key, entry) for entry in routed)}


def _first_match(patterns: dict[str, Group], entry: RoutedParameter) -> str | None:
    return next((pattern for pattern in patterns if _matches(pattern, entry)), None)


def _matches(pattern: str, entry: RoutedParameter) -> bool:
    if pattern.startswith(ROLE_PREFIX):
        return pattern.removeprefix(ROLE_PREFIX) == entry.role
    return any(fnmatchcase(name, pattern) for name in aliases(entry.name))


def _reason(entry: RoutedParameter, pattern: str | None) -> str:
    return entry.reason if pattern is None else f"{entry.reason}; options from the pattern {pattern!r}"


def check_adamw(adamw: Group) -> None:
    """Every key must be an option that AdamW knows, with a value that it takes."""
    _require_options("adamw", adamw)
    known = COMMON.keys() | ALGORITHMS[ADAMW].defaults.keys()
    for key, value in adamw.items():
        if key not in known:
            raise ValueError(f"adamw={{{key!r}: ...}}: {unknown_option(key, known, 'option of AdamW')}")
        validate_option(key, value)


def _require_options(label: str, options: Any) -> None:
    """Refuse a number or a name where options are expected."""
    if not isinstance(options, Mapping):
        example = '{"role:embedding": {"lr": 0.001}}' if label == "patterns" else '{"lr": 0.001}'
        raise TypeError(f"{label}={options!r}: must be a dict, such as {example}")


def _refuse_idle(adamw: Group, used: bool) -> None:
    if adamw and not used:
        raise ValueError(
            f"adamw={adamw!r} applies to nothing: no parameter of this model goes to AdamW; leave it out, or give the "
            f"options to the class itself or in patterns"
        )


def _refuse_unused(patterns: dict[str, Group], used: set[str | None], routed: list[RoutedParameter]) -> None:
    unused = [pattern for pattern in patterns if pattern not in used]
    if unused:
        names = ", ".join(entry.name for entry in routed[:3])
        raise ValueError(
            f"pattern {unused[0]!r} matches no parameter that an earlier pattern has not claimed; names look like "
            f"{names} and roles are {', '.join(ROLES)}"
        )


def _warn_without_matrices(groups: list[Group]) -> None:
    if any(_needs_matrices(group["algorithm"]) for group in groups):
        return
    roles = sorted({group["role"] for group in groups})
    lora = " Low-rank factors get Muon with patterns={'role:lora': {'algorithm': 'muon'}}." if "lora" in roles else ""
    warnings.warn(
        f"MuonSW.for_model found no matrix to orthogonalize: every parameter goes to another algorithm (roles: "
        f"{', '.join(roles)}). Look at optimizer.routing(reasons=True).{lora}",
        stacklevel=users_line(),
    )
