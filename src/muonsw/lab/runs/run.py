"""What a run folder holds, once it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muonsw.lab.runs.tabulate import POOLED, Matrix, Table

Column = NDArray[np.float64]


class Columns(Mapping[str, Column]):
    """Records of one kind as columns: a key gives an array with one value for each record.

    Values that are missing or null are not a number; a list such as `load_entropy` is `load_entropy.0` and so on.

    Examples:
        >>> columns = Columns(("step", "loss"), np.array([[1.0, 2.0], [3.5, np.nan]]))
        >>> columns.step.tolist(), columns["loss"].tolist(), sorted(columns)
        ([1, 2], [3.5, nan], ['loss', 'step'])
        >>> columns.get("z") is None
        True
    """

    def __init__(self, keys: tuple[str, ...] = (), values: Matrix | None = None):
        self._values = np.empty((len(keys), 0)) if values is None else values
        self._places = {key: place for place, key in enumerate(keys)}

    def __getitem__(self, key: str) -> Column:
        column: Column = self._values[self._places[key]]
        return column

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def step(self) -> NDArray[np.int64]:
        """The steps of the records, ascending."""
        return self["step"].astype(np.int64) if "step" in self else np.empty(0, np.int64)

    @property
    def records(self) -> int:
        """How many records there are."""
        return int(self._values.shape[1])

    def known(self, key: str) -> tuple[NDArray[np.int64], Column]:
        """Steps and values of a key where it has finite ones; both empty where it was never recorded."""
        if key not in self:
            return np.empty(0, np.int64), np.empty(0)
        finite = np.isfinite(self[key])
        return self.step[finite], self[key][finite]


class Telemetry:
    """What the recorder saw, by scope and key.

    Scopes are `all`, `decayed`, `role:NAME`, `layer:NUMBER` and `parameter:NAME`. Only the first two are read with
    the run; the others, which may be most of its file, once they are asked for.
    """

    def __init__(self, table: Table | None = None, details: Callable[[], Table | None] | None = None):
        self._pooled = _Scopes(table or NOTHING)
        self._details = details

    @cached_property
    def _whole(self) -> _Scopes:
        return self._pooled if self._details is None else _Scopes(self._details() or NOTHING)

    @property
    def step(self) -> NDArray[np.int64]:
        """The updates that were recorded, ascending."""
        return self._pooled.row("", "step").astype(np.int64)

    @property
    def skipped(self) -> Column:
        """How many updates had been skipped by then."""
        return self._whole.row("", "skipped")

    @property
    def records(self) -> int:
        """How many updates were recorded."""
        return self._pooled.records

    def scopes(self) -> list[str]:
        """Every scope that was recorded."""
        return [scope for scope in self._whole.places if scope]

    def keys(self, scope: str) -> list[str]:
        """What was recorded of a scope; nothing where it is not known."""
        return list(self._holding(scope).places.get(scope, {}))

    def column(self, scope: str, key: str) -> Column:
        """One value for each recorded update, not a number where there was none.

        Raises:
            KeyError: If the scope or the key was never recorded.
        """
        held = self._holding(scope)
        if key not in held.places.get(scope, {}):
            raise KeyError(f"telemetry holds no {key!r} of {scope!r}")
        return held.row(scope, key)

    def scope(self, scope: str) -> Columns:
        """Everything recorded of a scope, with `step`; without records where it is not known."""
        held = self._holding(scope)
        if scope not in held.places:
            return Columns(("step",))
        keys = [key for key in held.places[scope] if key != "step"]
        rows = [held.row("", "step"), *(held.row(scope, key) for key in keys)]
        return Columns(("step", *keys), np.stack(rows))

    def _holding(self, scope: str) -> _Scopes:
        return self._pooled if scope in POOLED else self._whole


class _Scopes:
    """A table of telemetry, with the places of its columns by scope and key."""

    def __init__(self, table: Table):
        self.records = int(table.values.shape[1])
        self.places: dict[str, dict[str, int]] = {}
        self._values = table.values
        for place, name in enumerate(table.keys):
            scope, _, key = name.rpartition("\t")
            self.places.setdefault(scope, {})[key] = place

    def row(self, scope: str, key: str) -> Column:
        place = self.places.get(scope, {}).get(key)
        return np.full(self.records, np.nan) if place is None else np.asarray(self._values[place])


NOTHING = Table((), np.empty((0, 0)))


@dataclass(frozen=True)
class Run:
    """A run folder, loaded.

    Attributes:
        name: What the folder is called.
        path: The folder.
        config: The whole configuration.
        environment: What it ran on; empty where that was not written.
        result: What was written at the end; None while the run is not complete.
        tables: The records by kind; of telemetry the pooled scopes.
        details: Reads the telemetry of all scopes.
    """

    name: str
    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    result: dict[str, Any] | None
    tables: Mapping[str, Table]
    details: Callable[[], Table | None] | None = None

    def columns(self, kind: str) -> Columns:
        """The records of a kind; without columns where there are none."""
        table = self.tables.get(kind)
        return Columns() if table is None else Columns(table.keys, table.values)

    @cached_property
    def train(self) -> Columns:
        """One record for each logged update."""
        return self.columns("train")

    @cached_property
    def evals(self) -> Columns:
        """One record for each evaluation."""
        return self.columns("eval")

    @cached_property
    def telemetry(self) -> Telemetry:
        """What the recorder saw of the weights."""
        return Telemetry(self.tables.get("telemetry"), self.details)

    @property
    def complete(self) -> bool:
        """Whether the run wrote its result."""
        return self.result is not None

    @property
    def rule(self) -> str:
        """The decay rule, such as `scaled`; empty where the configuration names none."""
        return str((self.config.get("optimizer") or {}).get("decay") or "")
