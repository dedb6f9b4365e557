"""Turning `metrics.jsonl` into columns of numbers, and keeping them in a file that loads at once.

This file imports nothing of the package and runs as a script, so that a process that only reads text does not load
torch first: `python tabulate.py` takes JSON lines `[METRICS, TARGET]` from its input.
"""

from __future__ import annotations

import gc
import io
import json
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

VERSION = 1
BLOCK = 1 << 20  # bytes of text that are read at a time; more would leave the processor's cache
POOLED = ("all", "decayed")
SPLIT = {"roles": "role", "layers": "layer", "parameters": "parameter"}
# What a cache that was cut short, or is something else altogether, makes numpy raise.
BROKEN = (OSError, ValueError, KeyError, EOFError, TypeError, BadZipFile)
# A telemetry line as far as its pooled scopes go; what follows is most of the file and seldom asked for.
HEAD = re.compile(rb'(\{"kind": ?"telemetry", ?"step": ?\d++(?>, ?"(?:all|decayed)": ?\{[^{}]*\})*+), ?"')
# What numbers are made of once exponents are capitals, and what names are made of; the rest of JSON is neither.
NUMERIC, NAMES, REST = b"0123456789.+-E", b'abcdefghijklmnopqrstuvwxyz_"', b"{}[]: "
KINDS = bytes(2 if byte in NUMERIC else 1 if byte in NAMES else 0 for byte in range(256))
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """Records of one kind: `values[column, record]`, not a number where a record lacks the key.

    Attributes:
        keys: Names of the columns; telemetry joins scope and key by a tab.
        values: Shape (columns, records).
    """

    keys: tuple[str, ...]
    values: Matrix


@dataclass(frozen=True)
class Stamp:
    """What tells whether a file has changed: its length and when it was last written."""

    size: int
    modified: int

    @classmethod
    def of(cls, path: Path) -> Stamp:
        """The stamp of a file as it is now."""
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns)


class Collector:
    """Gathers rows of equal shape together, so that each shape becomes one array."""

    def __init__(self) -> None:
        self.count = 0
        self._groups: dict[Hashable, tuple[tuple[str, ...], list[int], list[list[Any]]]] = {}
        self._done: list[tuple[tuple[str, ...], Sequence[int], Matrix]] = []

    def add(self, shape: Hashable, name: Callable[[], Iterable[str]], row: list[Any]) -> None:
        """Add a row; `name` gives the keys of its columns, and is asked once for each shape."""
        group = self._groups.get(shape)
        if group is None:
            group = self._groups[shape] = (tuple(name()), [], [])
        group[1].append(self.count)
        group[2].append(row)
        self.count += 1

    def add_rows(self, keys: tuple[str, ...], rows: Matrix) -> None:
        """Add rows that are numbers already."""
        self._done.append((keys, range(self.count, self.count + len(rows)), rows))
        self.count += len(rows)

    def flush(self) -> None:
        """Turn the rows gathered so far into arrays, which take a tenth of the memory."""
        for keys, places, rows in self._groups.values():
            try:
                self._done.append((keys, places, np.array(rows, dtype=np.float64)))  # None becomes not a number
            except (ValueError, TypeError):
                flat = [dict(_flatten(zip(keys, row, strict=True))) for row in rows]
                names = tuple(dict.fromkeys(name for record in flat for name in record))
                matrix = np.array([[record.get(name) for name in names] for record in flat], dtype=np.float64)
                self._done.append((names, places, matrix.reshape(len(rows), len(names))))
        self._groups.clear()

    def table(self) -> Table:
        """All rows, under the union of their keys."""
        self.flush()
        keys = tuple(dict.fromkeys(key for part, _, _ in self._done for key in part))
        index = {key: place for place, key in enumerate(keys)}
        values = np.full((len(keys), self.count), np.nan)
        for part, places, rows in self._done:
            columns = slice(places.start, places.stop) if isinstance(places, range) else places
            for key, row in zip(part, rows.T, strict=True):
                values[index[key], columns] = row
        return Table(keys, values)


def tabulate(path: Path, size: int | None = None, *, details: bool = True) -> dict[str, Table]:
    """Read a metrics file into one table for each kind of record.

    A last line that is not complete is left out, since a run in progress may be writing it.

    Args:
        path: The file.
        size: How many bytes of it count; all unless given.
        details: Whether telemetry of single roles, layers and parameters is read, and not the pooled scopes alone.

    Raises:
        ValueError: If another line is not a JSON object with a `kind`.
    """
    collectors: dict[str, Collector] = {}
    for first, text in _blocks(path, size):
        kinds: dict[bytes, list[bytes]] = {}
        for line in text.split(b"\n"):
            kinds.setdefault(line.partition(b",")[0], []).append(line)
        try:
            for start, lines in kinds.items():
                cut = not details and b"telemetry" in start
                _collect(collectors, [_head(line) for line in lines] if cut else lines)
        except ValueError:
            _complain(text, path, first)
    return {kind: _latest(collector.table()) for kind, collector in collectors.items()}


def save(tables: Mapping[str, Table], stamp: Stamp, target: Path) -> None:
    """Write tables beside `target` and rename, so that a reader never sees half of them."""
    header = {
        "version": VERSION,
        "stamp": [stamp.size, stamp.modified],
        "keys": {kind: table.keys for kind, table in tables.items()},
    }
    arrays = {f"values_{place}": table.values for place, table in enumerate(tables.values())}
    buffer = io.BytesIO()
    np.savez(buffer, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)  # type: ignore[arg-type]
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        beside.write_bytes(buffer.getbuffer())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def restore(target: Path, stamp: Stamp) -> dict[str, Table] | None:
    """The tables that `save` kept for a file with this stamp; None where there are none, or older or broken ones."""
    try:
        with target.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            keys = _fresh_keys(stored, stamp).items()
            return {kind: Table(tuple(names), stored[f"values_{place}"]) for place, (kind, names) in enumerate(keys)}
    except BROKEN:
        return None


def is_fresh(target: Path, stamp: Stamp) -> bool:
    """Whether `restore` would find tables, told from their header alone."""
    try:
        with target.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            _fresh_keys(stored, stamp)
            return True
    except BROKEN:
        return False


def _fresh_keys(stored: Mapping[str, Any], stamp: Stamp) -> dict[str, list[str]]:
    header = json.loads(stored["header"].tobytes())
    if header["version"] != VERSION or header["stamp"] != [stamp.size, stamp.modified]:
        raise ValueError("these columns are of an older file")
    return dict(header["keys"])


def _blocks(path: Path, size: int | None) -> Iterator[tuple[int, bytes]]:
    """Whole lines, some megabytes at a time, with the number of the first."""
    left = path.stat().st_size if size is None else size
    first, rest = 1, b""
    with path.open("rb") as file:
        while left > 0:
            block = file.read(min(BLOCK, left))
            left = left - len(block) if block else 0
            whole, end, rest = (rest + block).rpartition(b"\n")
            if end:
                yield first, whole
                first += whole.count(b"\n") + 1
    # A last line without an end is a record if it parses, and is being written if not.
    with suppress(ValueError):
        json.loads(rest)
        yield first, rest


def _collect(collectors: dict[str, Collector], lines: list[bytes]) -> None:
    """Read lines of one kind, as numbers alone where they are all alike, else as JSON."""
    numbers = _numbers(lines)
    if numbers is not None:
        kind, keys, rows = numbers
        collectors.setdefault(kind, Collector()).add_rows(keys, rows)
        return
    # One call for all lines is twice as fast as one for each.
    for record in json.loads(b"[" + b",".join(line for line in lines if line.strip()) + b"]"):
        if not isinstance(record, dict):
            raise ValueError("not an object")
        kind = str(record.pop("kind", ""))
        add = _add_telemetry if kind == "telemetry" else _add_flat
        add(collectors.setdefault(kind, Collector()), record)
    for collector in collectors.values():
        collector.flush()


def _numbers(lines: list[bytes]) -> tuple[str, tuple[str, ...], Matrix] | None:
    """Kind, keys and values of lines that differ in their numbers alone; None where that is not so.

    Without names and brackets a line is a list of numbers, and reading it takes a third of the time. Names with a
    digit or a capital, lines that are not all alike, and text anywhere but in `kind` are left to JSON.
    """
    text = b"\n".join(lines)
    if b"null" in text:
        text = text.replace(b" null", b" 1E+999").replace(b":null", b":1E+999")
    text = text.replace(b"e-", b"E-").replace(b"e+", b"E+")
    kinds = np.frombuffer(text.translate(KINDS), np.uint8)
    mixed = ((kinds[:-1] == 1) & (kinds[1:] == 2)).any()
    if mixed or len(set(text.translate(None, NUMERIC).split(b"\n"))) != 1:
        return None
    try:
        first = json.loads(lines[0])
        kind = str(first.pop("kind"))
        keys = tuple(_telemetry_keys(first) if kind == "telemetry" else dict(_flatten(first.items())))
        bare = text.translate(None, NAMES + REST).replace(b"\n,", b",")
        values = np.fromiter(map(float, bare[1:].split(b",")), np.float64)
        rows = values.reshape(len(lines), len(keys))
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    rows[np.isinf(rows)] = np.nan
    return kind, keys, rows


def _head(line: bytes) -> bytes:
    """The line without what follows its pooled scopes; whole where those may come later."""
    found = HEAD.match(line)
    if not found or any(line.find(b'"%b"' % scope.encode(), found.end(1)) >= 0 for scope in POOLED):
        return line
    return found[1] + b"}"


def _complain(text: bytes, path: Path, first: int) -> None:
    """Find the line that cannot be read.

    Raises:
        ValueError: With the number of the line.
    """
    for number, line in enumerate(text.split(b"\n"), first):
        try:
            known = not line.strip() or isinstance(json.loads(line), dict)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not JSON ({error})") from None
        if not known:
            raise ValueError(f"{path}, line {number} is not a JSON object: {line[:60].decode(errors='replace')}")
    raise ValueError(f"{path} holds a record that cannot be read, after line {first}")


def _add_flat(collector: Collector, record: dict[str, Any]) -> None:
    shape = tuple(record)
    collector.add(shape, lambda: shape, list(record.values()))


def _flatten(items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Lists and objects become columns such as `load_entropy.0`; text is left out."""
    for key, value in items:
        if isinstance(value, list):
            yield from _flatten((f"{key}.{place}", item) for place, item in enumerate(value))
        elif isinstance(value, dict):
            yield from _flatten((f"{key}.{name}", item) for name, item in value.items())
        elif value is None or isinstance(value, int | float):
            yield key, value


def _add_telemetry(collector: Collector, record: dict[str, Any]) -> None:
    scopes = list(_scopes(record))
    shape = tuple((scope, *values) for scope, values in scopes)
    row = [value for _, values in scopes for value in values.values()]
    collector.add(shape, lambda: (f"{scope}\t{key}" for scope, values in scopes for key in values), row)


def _telemetry_keys(record: Mapping[str, Any]) -> Iterator[str]:
    """The columns of a record, in the order of its text.

    Raises:
        ValueError: If it holds something that is not known.
    """
    for name, value in record.items():
        if not isinstance(value, dict):
            yield f"\t{name}"
        elif name in POOLED:
            yield from (f"{name}\t{key}" for key in value)
        elif name in SPLIT:
            yield from (f"{SPLIT[name]}:{part}\t{key}" for part, values in value.items() for key in values)
        else:
            raise ValueError(f"unknown telemetry {name}")


def _scopes(record: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "", {key: value for key, value in record.items() if not isinstance(value, dict | list | str)}
    for scope in POOLED:
        if isinstance(record.get(scope), dict):
            yield scope, record[scope]
    for group, scope in SPLIT.items():
        for name, values in (record.get(group) or {}).items():
            yield f"{scope}:{name}", values


def _latest(table: Table) -> Table:
    """One record for each step, in order; the last one written counts."""
    name = "step" if "step" in table.keys else "\tstep"
    if name not in table.keys:
        return table
    steps = table.values[table.keys.index(name)]
    if (np.diff(steps) > 0).all():
        return table
    _, last = np.unique(steps[::-1], return_index=True)
    return Table(table.keys, np.ascontiguousarray(table.values[:, steps.size - 1 - last]))


def main() -> None:
    """Tabulate each file named on standard input; one that cannot be read is left to the reader to complain about."""
    gc.disable()  # records hold no cycles, and there are a great many of them
    for line in sys.stdin:
        metrics, target = (Path(part) for part in json.loads(line))
        try:
            stamp = Stamp.of(metrics)
            save(tabulate(metrics, stamp.size, details=False), stamp, target)
        except (OSError, ValueError):
            continue


if __name__ == "__main__":
    main()
