"""Which parameter belongs to which group: by role, overridable by pattern, and strict."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

Group = dict[str, Any]

ROLE_PREFIX = "role:"

# Roles whose parameters are hidden matrices: decayed, and orthogonalized under Muon.
MATRIX_ROLES = ("hidden", "experts", "convolution")
ROLES = (*MATRIX_ROLES, "embedding", "head", "router", "norm", "bias", "vector")

# Names by which a module tells its role; heads only outside numbered layers, the ambiguous router names only
# where the matrix is wide, since a SwiGLU projection may be called gate too.
_HEAD_NAMES = re.compile(r"^(lm_head|head|output|unembed(ding)?|embed_out|classifier|score|logits)$")
_ROUTER_NAMES = re.compile(r"^(router|gate|gating|gate_network|wg)$")
_EMBEDDING_NAMES = re.compile(r"(^|_)(emb|embed|embedding|embeddings|wte|wpe|pos_embed|tok_embed)($|_)")


def route(model: nn.Module, algorithm: str, *, patterns: dict[str, Group], adamw: Group) -> list[Group]:
    """Param groups for a model, one for each set of options that its parameters end up with."""
    matched: set[str] = set()
    groups: dict[str, Group] = {}
    for name, param, role, matrix in classify(model):
        options = _role_options(role, matrix, algorithm, adamw)
        pattern = next((p for p in patterns if _matches(p, name, role)), None)
        if pattern is not None:
            matched.add(pattern)
            options.update(patterns[pattern])
        key = repr(sorted(options.items(), key=lambda item: item[0]))
        groups.setdefault(key, {**options, "params": []})["params"].append((name, param))
    _refuse_empty(patterns, matched, model)
    if not groups:
        raise ValueError("the model has no parameter that requires a gradient")
    return list(groups.values())


def classify(model: nn.Module) -> Iterator[tuple[str, Tensor, str, str | None]]:
    """Name, parameter, role and matrix view of each trainable parameter; tied weights come once."""
    head = _output_module(model)
    for name, param in model.named_parameters():
        if param.requires_grad:
            owner = model.get_submodule(name.rpartition(".")[0])
            role = _role(name, param, owner, owner is head)
            yield name, param, role, _matrix_view(param, role)


def _output_module(model: nn.Module) -> nn.Module | None:
    """The head of a model whose names do not tell: the model's own word, or the one layer as wide as its vocabulary.

    By size, it must be the last linear layer and the only one of that width; a tied head is an embedding.
    """
    declared: Any = getattr(model, "get_output_embeddings", None)  # Hugging Face models know their head
    if callable(declared):
        return cast("nn.Module | None", declared())
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    vocabulary = max((table.num_embeddings for table in tables), default=None)
    widths = [linear.out_features for linear in linears]
    return linears[-1] if linears and widths[-1] == vocabulary and widths.count(vocabulary) == 1 else None


def _role(name: str, param: Tensor, owner: nn.Module, is_output: bool) -> str:
    words = name.split(".")
    own, holder = words[-1], words[-2] if len(words) > 1 else ""
    if own.endswith("bias"):
        return "bias"
    if "norm" in type(owner).__name__.lower():
        return "norm"
    if isinstance(owner, nn.Embedding) or any(_EMBEDDING_NAMES.search(word.lower()) for word in (own, holder)):
        return "embedding"
    if param.dim() < 2:
        return "vector"
    if is_output or (_HEAD_NAMES.match(holder) and not any(word.isdigit() for word in words)):
        return "head"
    if any(
        word == "router" or (_ROUTER_NAMES.match(word) and param.shape[-2] < param.shape[-1]) for word in (own, holder)
    ):
        return "router"
    if isinstance(owner, _ConvNd):
        return "convolution"
    return "experts" if param.dim() > 2 or "experts" in words else "hidden"


def _matrix_view(param: Tensor, role: str) -> str | None:
    """How Muon sees the parameter; None where two axes need no word, or where only the user can say."""
    if role == "convolution":
        return "flatten"
    return "stack" if param.dim() == 3 else None


def _role_options(role: str, matrix: str | None, algorithm: str, adamw: Group) -> Group:
    if role in MATRIX_ROLES:
        return {"role": role, "algorithm": algorithm, "matrix": matrix}
    other = "adamw" if algorithm == "muon" else algorithm
    options: Group = {"role": role, "algorithm": other, "weight_decay": 0.0}
    return {**options, **adamw} if other == "adamw" else options


def _matches(pattern: str, name: str, role: str) -> bool:
    if pattern.startswith(ROLE_PREFIX):
        return pattern.removeprefix(ROLE_PREFIX) == role
    return fnmatchcase(name, pattern)


def _refuse_empty(patterns: dict[str, Group], matched: set[str], model: nn.Module) -> None:
    unused = [pattern for pattern in patterns if pattern not in matched]
    if unused:
        names = [name for name, param in model.named_parameters() if param.requires_grad]
        raise ValueError(
            f"pattern {unused[0]!r} matches no parameter that an earlier pattern has not claimed; names look like "
            f"{', '.join(names[:3])} and roles are {', '.join(ROLES)}"
        )


def routing_table(groups: list[Group]) -> str:
    """Groups as a plain-text table: role, algorithm, decay, learning rate, sizes and the first names."""
    header = ("group", "role", "algorithm", "decay", "lr", "tensors", "parameters", "names")
    rows = [header]
    for number, group in enumerate(groups):
        names = group.get("param_names") or []
        shown = ", ".join(names[:2]) + (f", ... ({len(names) - 2} more)" if len(names) > 2 else "")
        lam = float(group["weight_decay"])
        rows.append(
            (
                str(number),
                group["role"] or "-",
                group["algorithm"],
                f"{group['decay']} {lam:g}" if lam else "none",
                f"{float(group['lr']):g}",
                str(len(group["params"])),
                f"{sum(p.numel() for p in group['params']):,}",
                shown,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
