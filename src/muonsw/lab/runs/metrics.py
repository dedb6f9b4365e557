"""Reading `metrics.jsonl`: one JSON object a line, of which every number becomes part of a column.

Records of a kind are read together. A telemetry record has several scopes (all weights, a role, a layer, a parameter);
each scope has columns of its own, and all of them as many records.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from muonsw.lab.files import parse_json

try:
    from orjson import loads
except ModuleNotFoundError:  # the standard library reads the same, and takes about three times as long
    loads = parse_json  # type: ignore[assignment]

BLOCK = 1 << 20  # bytes of text that are read at a time; more would leave the cache of the processor
# No record of ours comes near these. They bound the memory that a file can ask for: columns have a place for every
# record, so that keys which hardly any record has are dear.
LINE_BYTES, DEPTH = 1 << 26, 8
FREE_CELLS, CELLS_FOR_EACH_VALUE = 1 << 20, 64
LARGEST_STEP = float(1 << 53)
POOLED = ("all", "decayed")
SPLIT = {"roles": "role", "layers": "layer", "parameters": "parameter"}
Values = NDArray[np.float64]
Record = dict[str, Any]


class Columns(dict[str, Values]):
    """Records of one kind as columns: a key gives an array with one value for each record.

    Values that are missing or null are not a number; a list such as `load_entropy` is `load_entropy.0` and so on.

    Examples:
        >>> columns = Columns({"step": np.array([1.0, 2.0]), "loss": np.array([3.5, np.nan])})
        >>> columns.step.tolist(), columns["loss"].tolist(), sorted(columns)
        ([1, 2], [3.5, nan], ['loss', 'step'])
    """

    @property
    def step(self) -> NDArray[np.int64]:
        """The steps of the records, ascending."""
        return self["step"].astype(np.int64) if "step" in self else np.empty(0, np.int64)

    @property
    def records(self) -> int:
        """How many records there are."""
        return len(next(iter(self.values()), ()))

    def known(self, key: str) -> tuple[NDArray[np.int64], Values]:
        """Steps and values of a key where it has finite ones; both empty where it was never recorded."""
        if key not in self or "step" not in self:
            return np.empty(0, np.int64), np.empty(0)
        finite = np.isfinite(self[key])
        return self.step[finite], self[key][finite]


def read_metrics(path: Path, *, details: bool) -> dict[str, dict[str, Columns]]:
    """The columns of a file, by kind of record and by scope; kinds other than telemetry have the scope "" alone.

    Args:
        path: The file. A last line that is still being written is left out.
        details: Whether telemetry of single roles, layers and parameters is read, or the pooled scopes alone.

    Raises:
        ValueError: If another line is not a record, or if the records have hardly a key in common.
    """
    parts: defaultdict[str, defaultdict[str, list[_Part]]] = defaultdict(lambda: defaultdict(list))
    with _no_garbage_collection():
        for number, records in _blocks(path):
            for kind, places, alike in _alike(records, number):
                for scope, part in _by_scope(places, alike, details):
                    parts[kind][scope].append(part)
    return {kind: _assemble(scopes) for kind, scopes in parts.items()}


def _blocks(path: Path) -> Iterator[tuple[int, list[Record]]]:
    """Some megabytes of records at a time, with the number of the first line."""
    first, rest = 1, b""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            whole, _, rest = (rest + block).rpartition(b"\n")
            if len(rest) > LINE_BYTES:
                raise ValueError(f"{path} has a line of more than {LINE_BYTES >> 20} MiB")
            if whole:
                yield first, _records(whole, path, first)
                first += whole.count(b"\n") + 1
    with suppress(ValueError):  # a last line without an end is a record if it can be read, and is being written if not
        yield first, _records(rest, path, first)


def _records(text: bytes, path: Path, first: int) -> list[Record]:
    """The records of whole lines; an error names the line that is not a JSON object."""
    with suppress(ValueError):
        # One call for all lines is faster than one for each.
        records: list[Record] = loads(b"[" + text.replace(b"\n", b",") + b"]")
        if {dict}.issuperset(map(type, records)):
            return records
    records = []
    for number, line in enumerate(text.split(b"\n"), first):
        if not line.strip():
            continue
        try:
            record = loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error})") from None
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object: {line[:60].decode(errors='replace')}")
        records.append(record)
    return records


def _alike(records: Sequence[Record], first: int) -> Iterator[tuple[str, list[int], list[Record]]]:
    """Records of one kind with the same keys, with their numbers in the file."""
    groups: defaultdict[tuple[str, ...], tuple[list[int], list[Record]]] = defaultdict(lambda: ([], []))
    for number, record in enumerate(records, first):
        places, alike = groups[str(record.get("kind", "")), *record]
        places.append(number)
        alike.append(record)
    for (kind, *_), (places, alike) in groups.items():
        yield kind, places, alike


def _by_scope(places: list[int], alike: list[Record], details: bool) -> Iterator[tuple[str, _Part]]:
    """The numbers of records that are alike; of telemetry those of each scope as well."""
    keys = [key for key in alike[0] if key != "kind"]
    scopes = [key for key in keys if key in POOLED or key in SPLIT] if "all" in keys else []
    yield "", _part(places, alike, [key for key in keys if key not in scopes])
    for name in scopes:
        values = [record[name] for record in alike]
        _require_objects(values, places, name)
        if name in POOLED:
            yield from ((name, part) for part in _parts(places, values))
        elif details:
            for inner in dict.fromkeys(key for value in values for key in value):
                found = [(place, value[inner]) for place, value in zip(places, values, strict=True) if inner in value]
                _require_objects([value for _, value in found], [place for place, _ in found], f"{name}.{inner}")
                yield from ((f"{SPLIT[name]}:{inner}", part) for part in _parts(*zip(*found, strict=True)))


def _require_objects(values: Sequence[Any], places: Sequence[int], name: str) -> None:
    if not {dict}.issuperset(map(type, values)):
        wrong = next(place for place, value in zip(places, values, strict=True) if type(value) is not dict)
        raise ValueError(f"{name[:60]!r} in line {wrong} is not a JSON object")


def _parts(places: Sequence[int], values: Sequence[Record]) -> Iterator[_Part]:
    for _, chosen, alike in _alike(values, 0):
        yield _part([places[place] for place in chosen], alike, list(alike[0]))


class _Part(NamedTuple):
    """Columns of some records, and which records they are."""

    places: NDArray[np.int64]
    columns: dict[str, Values]


def _part(places: Sequence[int], alike: Sequence[Record], keys: Sequence[str]) -> _Part:
    columns = chain.from_iterable(_arrays(key, alike).items() for key in keys)
    return _Part(np.array(places), dict(columns))


def _assemble(scopes: Mapping[str, Sequence[_Part]]) -> dict[str, Columns]:
    """The columns of all scopes, under the union of their keys; of several records of one step the last counts."""
    places = np.sort(np.concatenate([part.places for part in scopes[""]]))
    _require_common_keys(scopes.values(), len(places))
    whole = _union(scopes[""], places)
    found = {scope: whole | _union(parts, places) if scope else whole for scope, parts in scopes.items()}
    steps = whole.get("step")
    if steps is not None and not (possible := (steps >= 0) & (steps < LARGEST_STEP)).all():
        raise ValueError(f"the record in line {places[np.argmin(possible)]} has no step")
    if steps is None or (np.diff(steps) > 0).all():
        return {scope: Columns(columns) for scope, columns in found.items()}
    _, last = np.unique(steps[::-1], return_index=True)
    chosen = steps.size - 1 - last
    return {scope: Columns({key: one[chosen] for key, one in columns.items()}) for scope, columns in found.items()}


def _require_common_keys(scopes: Iterable[Sequence[_Part]], records: int) -> None:
    """Refuse records so unlike each other that their columns would be nearly empty, and many."""
    values = cells = 0
    for parts in scopes:
        values += sum(len(part.places) * len(part.columns) for part in parts)
        cells += records * len({key for part in parts for key in part.columns})
    if cells > FREE_CELLS + CELLS_FOR_EACH_VALUE * values:
        raise ValueError(f"{records} records have hardly a key in common: they are not those of one run")


def _union(parts: Sequence[_Part], places: NDArray[np.int64]) -> dict[str, Values]:
    columns = {key: np.full(len(places), np.nan) for part in parts for key in part.columns}
    for part in parts:
        at = np.searchsorted(places, part.places)
        for key, column in part.columns.items():
            columns[key][at] = column
    return columns


def _arrays(key: str, records: Sequence[Record]) -> dict[str, Values]:
    """The values of one key as one array, or as several where they are lists or objects; text is left out.

    Examples:
        >>> _arrays("load", [{"load": [1, 2]}, {"load": None}])
        {'load.0': array([ 1., nan]), 'load.1': array([ 2., nan])}
    """
    if not isinstance(records[0][key], str):  # which might be a number in quotes
        with suppress(TypeError, ValueError, OverflowError):
            return {key: np.fromiter(map(itemgetter(key), records), np.float64, len(records))}
    flat = [dict(_flatten(key, record[key])) for record in records]
    names = dict.fromkeys(name for values in flat for name in values)
    return {name: np.array([values.get(name) for values in flat], dtype=np.float64) for name in names}


def _flatten(key: str, value: Any, depth: int = DEPTH) -> Iterator[tuple[str, float | None]]:
    if isinstance(value, list | dict):
        if not depth:
            raise ValueError(f"{key[:60]!r} is nested more than {DEPTH} deep")
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
        for name, item in items:
            yield from _flatten(f"{key}.{name}", item, depth - 1)
    elif isinstance(value, int | float):
        yield key, value


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Records hold no cycles, and there are a great many of them."""
    resume = gc.enable if gc.isenabled() else gc.disable
    gc.disable()
    try:
        yield
    finally:
        resume()
