"""Param groups for a whole model, from roles and patterns, one per set of options; and tables that show them."""

from __future__ import annotations

import warnings
from collections import Counter
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from muonsw.algorithms import ALGORITHMS
from muonsw.options import COMMON
from muonsw.registry import unknown
from muonsw.routing.facts import PEFT_PREFIX
from muonsw.routing.roles import MATRIX_ROLES, ROLES, RoutedParameter, classify
from muonsw.text import text_table, users_line
from muonsw.work import Group

ADAMW = "adamw"


def route(
    model: nn.Module, algorithm: str, *, patterns: dict[str, Group], adamw: Group
) -> tuple[list[Group], dict[str, str]]:
    """Make a model's param groups, one per distinct set of options, matrices first; and each parameter's reason."""
    known = COMMON.keys() | ALGORITHMS[ADAMW].defaults.keys()
    for key in adamw:
        if key not in known:
            raise ValueError(f"adamw={{{key!r}: ...}}: {unknown('option of AdamW', key, sorted(known))}")
    _refuse_flattened(model)
    routed = list(classify(model))
    if not routed:
        raise ValueError("the model has no parameter that requires a gradient")

    groups: list[Group] = []
    identities: list[Group] = []
    reasons: dict[str, str] = {}
    used: set[str | None] = set()
    for entry in routed:
        pattern = next((pattern for pattern in patterns if _matches(pattern, entry)), None)
        overrides = {} if pattern is None else patterns[pattern]
        is_matrix = entry.role in MATRIX_ROLES
        default = algorithm if is_matrix or not _needs_matrices(algorithm) else ADAMW
        final = overrides.get("algorithm", default)
        # Later options win: those of the role, `adamw` if the parameter goes to AdamW, those of the pattern.
        options: Group = {"role": entry.role, "algorithm": default}
        if not entry.decayed:
            options["weight_decay"] = 0.0
        if is_matrix or _needs_matrices(final):
            options |= {"matrix": None, **entry.view}
        if final == ADAMW and not (is_matrix and algorithm == ADAMW):  # matrices of AdamWSW use its options
            options |= adamw
        options |= overrides
        # Equal tensors stay distinct, because their values may change later.
        identity = {key: id(value) if isinstance(value, Tensor) else value for key, value in options.items()}
        if identity not in identities:
            identities.append(identity)
            groups.append({**options, "params": []})
        groups[identities.index(identity)]["params"].append((entry.name, entry.param))
        reasons[entry.name] = entry.reason + ("" if pattern is None else f"; options from the pattern {pattern!r}")
        used.add(pattern)

    if unused := [pattern for pattern in patterns if pattern not in used]:
        raise ValueError(
            f"pattern {unused[0]!r} matches no parameter, or only those that an earlier pattern claimed; names "
            f"look like {', '.join(entry.name for entry in routed[:3])} and roles are {', '.join(ROLES)}"
        )
    if _needs_matrices(algorithm) and not any(_needs_matrices(group["algorithm"]) for group in groups):
        roles = sorted({group["role"] for group in groups})
        lora = " Low-rank factors get Muon with patterns={'role:lora': {'algorithm': 'muon'}}."
        warnings.warn(
            f"MuonSW.for_model found no matrix to orthogonalize: every parameter goes to another algorithm (roles: "
            f"{', '.join(roles)}). See optimizer.routing(reasons=True).{lora if 'lora' in roles else ''}",
            stacklevel=users_line(),
        )
    groups.sort(key=lambda group: group["role"] not in MATRIX_ROLES)
    _name(groups)
    return groups, reasons


def _name(groups: list[Group]) -> None:
    """Give each group a unique name, for loggers."""
    taken: Counter[str] = Counter()
    for group in groups:
        name = base = str(group.get("name") or group["role"])
        while name in taken:
            taken[base] += 1
            name = f"{base}-{taken[base]}"
        taken[name], group["name"] = 1, name


def _needs_matrices(algorithm: str) -> bool:
    return ALGORITHMS[algorithm].matrices is not None


def patterns_within(model: nn.Module, patterns: dict[str, Group]) -> dict[str, Group]:
    """The patterns that match something in this model, which may be one pipeline stage."""
    routed = list(classify(model))
    return {key: options for key, options in patterns.items() if any(_matches(key, entry) for entry in routed)}


def _matches(pattern: str, entry: RoutedParameter) -> bool:
    names = (entry.name, entry.name.removeprefix(PEFT_PREFIX))
    return pattern == f"role:{entry.role}" or any(fnmatchcase(name, pattern) for name in names)


def _refuse_flattened(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        path, _, key = name.rpartition(".")
        sized = isinstance(model.get_submodule(path), nn.Linear | nn.Embedding | _ConvNd)
        is_flat = sized and key == "weight" and param.dim() < 2
        if is_flat or key == "_flat_param" or type(param).__name__ == "FlatParameter":
            raise ValueError(
                f"{name} has been flattened to a vector, as FullyShardedDataParallel (FSDP1) does. Shard with "
                f"torch.distributed.fsdp.fully_shard (FSDP2), which keeps shapes, or use DistributedDataParallel"
            )


def routing_table(groups: list[Group]) -> str:
    rows = [("group", "role", "algorithm", "decay", "lr", "tensors", "parameters", "names")]
    for number, group in enumerate(groups):
        names, lam = group.get("param_names") or [], float(group["weight_decay"])
        slots = (group["algorithm"], group.get("precondition"), group.get("normalize"))
        rows.append(
            (
                str(number),
                group["role"] or "-",
                ", ".join([" + ".join(slot for slot in slots if slot), *_cuts(group)]),
                f"{group['decay']} {lam:g}" if lam else "none",
                f"{float(group['lr']):g}",
                str(len(group["params"])),
                f"{sum(p.numel() for p in group['params']):,}",
                ", ".join(names[:2]) + (f", ... ({len(names) - 2} more)" if len(names) > 2 else ""),
            )
        )
    return text_table(rows)


def reasons_table(groups: list[Group], reasons: dict[str, str]) -> str:
    rows = [("group", "role", "algorithm", "shape", "seen as", "name", "reason")]
    for number, group in enumerate(groups):
        names = group.get("param_names") or ["-"] * len(group["params"])
        view, seen = ALGORITHMS[group["algorithm"]].view(group), "-"
        if view is not None:
            words = [view.matrix or "", "(in, out)" if view.transposed else "", *_cuts(group)]
            seen = " ".join(filter(None, words)) or "matrix"
        for name, param in zip(names, group["params"], strict=True):
            shape = "x".join(map(str, param.shape)) or "scalar"
            reason = reasons.get(name, "assigned by hand")
            rows.append((str(number), group["role"] or "-", group["algorithm"], shape, seen, name, reason))
    return text_table(rows)


def _cuts(group: Group) -> list[str]:
    view = ALGORITHMS[group["algorithm"]].view(group)
    if view is None or not (view.heads or view.split_sizes):
        return []
    return [f"{view.heads} blocks" if view.heads else f"{len(view.split_sizes or ())} parts"]
