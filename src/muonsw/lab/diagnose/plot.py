"""Telemetry as a picture: one call for a file of JSON Lines. Needs matplotlib, which is imported when it is called."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from muonsw.telemetry.record import Record
from muonsw.telemetry.sinks import KIND

PANELS = {
    "weight_rms": "RMS of the weights",
    "relative_update": "update / weight",
    "decay": "decay of one update",
    "alignment_update": "cosine of weight and update",
}


def plot(records: str | Path | Iterable[Record], to: str | Path | None = None, *, roles: Iterable[str] = ()) -> Any:
    """Draw size, relative update, decay and alignment of each role over the updates.

    Args:
        records: a file that `JsonlSink` wrote, or records such as `telemetry.records`.
        to: where to save the picture, by its ending (`.png`, `.svg`, `.pdf`); None leaves that to the caller.
        roles: the only roles to draw; all of them where none is named.

    Returns:
        The `matplotlib.figure.Figure`.
    """
    from matplotlib.figure import Figure

    known = read(records) if isinstance(records, str | Path) else list(records)
    wanted = list(roles) or sorted({role for record in known for role in record["roles"]})
    _refuse_empty(records, known, wanted)
    figure = Figure(figsize=(11, 7), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for role in wanted:
            axes.plot(*_curve(known, role, key), label=role)
        axes.set(title=title, xlabel="update")
    figure.axes[0].legend()
    if to is not None:
        figure.savefig(to, dpi=150)
    return figure


def _curve(records: Iterable[Record], role: str, key: str) -> tuple[list[int], list[float]]:
    """The updates at which a value of a role is known, and the values."""
    found = [(record["step"], record["roles"].get(role, {}).get(key)) for record in records]
    known = [(step, value) for step, value in found if value is not None]
    return [step for step, _ in known], [value for _, value in known]


def read(path: str | Path) -> list[Record]:
    """The telemetry records of a file of JSON Lines; other records, and a last line cut short, are left out."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break  # the run was killed while it wrote
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        if isinstance(record, dict) and record.get("kind", KIND) == KIND and "roles" in record:
            found.append(record)
    return found


def _refuse_empty(source: Any, known: list[Record], roles: list[str]) -> None:
    where = source if isinstance(source, str | Path) else "the records"
    if not known:
        raise ValueError(f"{where}: there is no telemetry in it, so there is nothing to draw")
    for role in roles:
        if not any(role in record["roles"] for record in known):
            there = ", ".join(sorted({name for record in known for name in record["roles"]})) or "none"
            raise ValueError(f"role {role!r} is in none of the records; there are: {there}")
