"""The routing as plain text: one line for each group, or one for each parameter with the reason for its role."""

from __future__ import annotations

from collections.abc import Iterable

from muonsw.algorithms import ALGORITHMS
from muonsw.text import text_table
from muonsw.work import Group


def routing_table(groups: list[Group]) -> str:
    """Groups as a table: role, algorithm, decay, learning rate, sizes and the first names."""
    header = ("group", "role", "algorithm", "decay", "lr", "tensors", "parameters", "names")
    return text_table([header, *(_group_row(number, group) for number, group in enumerate(groups))])


def reasons_table(groups: list[Group], reasons: dict[str, str]) -> str:
    """Every parameter: its group, role, algorithm, shape, how Muon sees it, and why."""
    header = ("group", "role", "algorithm", "shape", "seen as", "name", "reason")
    rows = [row for number, group in enumerate(groups) for row in _parameter_rows(number, group, reasons)]
    return text_table([header, *rows])


def _group_row(number: int, group: Group) -> tuple[str, ...]:
    names = group.get("param_names") or []
    lam = float(group["weight_decay"])
    return (
        str(number),
        group["role"] or "-",
        _algorithm(group),
        f"{group['decay']} {lam:g}" if lam else "none",
        f"{float(group['lr']):g}",
        str(len(group["params"])),
        f"{sum(p.numel() for p in group['params']):,}",
        ", ".join(names[:2]) + (f", ... ({len(names) - 2} more)" if len(names) > 2 else ""),
    )


def _algorithm(group: Group) -> str:
    """The algorithm and the members of its slots."""
    members = (group.get("precondition"), group.get("normalize"))
    return " + ".join([group["algorithm"], *(member for member in members if member)])


def _parameter_rows(number: int, group: Group, reasons: dict[str, str]) -> Iterable[tuple[str, ...]]:
    names = group.get("param_names") or ["-"] * len(group["params"])
    for name, param in zip(names, group["params"], strict=True):
        shape = "x".join(map(str, param.shape)) or "scalar"
        reason = reasons.get(name, "put into this group by hand")
        yield str(number), group["role"] or "-", group["algorithm"], shape, _view(group), name, reason


def _view(group: Group) -> str:
    """The options by which Muon finds matrices in a parameter, in words."""
    view = ALGORITHMS[group["algorithm"]].view(group)
    if view is None:
        return "-"
    parts = [view.matrix] if view.matrix else []
    parts += ["(in, out)"] if view.transposed else []
    parts += [f"{view.heads} blocks"] if view.heads else [f"{len(view.split_sizes)} parts"] if view.split_sizes else []
    return " ".join(parts) or "matrix"
