"""Loading run folders, large ones through columns kept from the last time."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from muonsw.lab.errors import UsageError
from muonsw.lab.processes import cores
from muonsw.lab.runs import tabulate
from muonsw.lab.runs.run import Run
from muonsw.lab.runs.tabulate import Stamp, Table, is_fresh, restore, save

METRICS, CACHE, DETAILS = "metrics.jsonl", "metrics.cache.npz", "metrics.details.npz"
KEEP_FROM = 512 << 10  # bytes of metrics from which columns are kept
SHARE_FROM = 16 << 20  # bytes of metrics to read from which processes pay


@dataclass(frozen=True)
class Metrics:
    """A metrics file, what tells its state, and where its columns are kept."""

    path: Path
    stamp: Stamp
    cache: Path | None


def load_run(path: str | Path) -> Run:
    """Load a run folder; what a run in progress has not written yet is empty.

    Raises:
        UsageError: If it is not a run folder, or its files cannot be read.
    """
    return load_runs([path])[0]


def load_runs(paths: Iterable[str | Path], *, processes: int | None = None) -> list[Run]:
    """Load run folders, in the order given.

    Args:
        paths: The folders.
        processes: How many processes share the reading of large metrics files; one for each core unless given.

    Raises:
        UsageError: If one of them is not a run folder, or its files cannot be read.
    """
    folders = [Path(path) for path in paths]
    for folder in folders:
        _require_run(folder)
    sources = [_metrics(folder) for folder in folders]
    _share(sources, processes or cores())
    return [_assemble(folder, source) for folder, source in zip(folders, sources, strict=True)]


def keep_columns(path: str | Path) -> None:
    """Keep the columns of a run that has just ended, so that reports load it at once; small runs need none."""
    source = _metrics(Path(path))
    if source is not None:
        _tables(source)


def _require_run(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise UsageError(f"{folder} is not a run: it {what}; name a folder that `muonsw train` wrote")
    if not (folder / "config.json").is_file():
        inside = sorted(child.name for child in folder.iterdir() if (child / "config.json").is_file())
        hint = f"it holds runs: {', '.join(inside[:3])}" if inside else "name a folder that `muonsw train` wrote"
        raise UsageError(f"{folder} is not a run: it has no config.json; {hint}")


def _metrics(folder: Path) -> Metrics | None:
    path = folder / METRICS
    try:
        stamp = Stamp.of(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    return Metrics(path, stamp, _cache_path(folder) if stamp.size >= KEEP_FROM else None)


def _cache_path(folder: Path) -> Path:
    beside = folder / CACHE
    if os.access(folder, os.W_OK) or beside.exists():
        return beside
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "muonsw" / "runs" / f"{hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]}.{CACHE}"


def _share(sources: Sequence[Metrics | None], processes: int) -> None:
    """Let processes tabulate what has no fresh columns yet; whatever they leave undone is read here later."""
    work = [(source, source.cache) for source in sources if source and source.cache]
    work = [(source, cache) for source, cache in work if not is_fresh(cache, source.stamp) and _prepare(cache)]
    processes = min(processes, len(work))
    if processes < 2 or sum(source.stamp.size for source, _ in work) < SHARE_FROM:
        return
    work.sort(key=lambda item: -item[0].stamp.size)
    lines = [json.dumps([str(source.path.absolute()), str(cache.absolute())]) for source, cache in work]
    shares = ["\n".join(lines[first::processes]) for first in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(_tabulate_elsewhere, shares))


def _tabulate_elsewhere(jobs: str) -> None:
    # By its path and not as a module: importing the package would load torch in every process.
    command = [sys.executable, "-P", tabulate.__file__]
    subprocess.run(command, input=jobs, text=True, stderr=subprocess.DEVNULL, check=False)


def _tables(source: Metrics) -> Mapping[str, Table]:
    """Everything but the telemetry of single roles, layers and parameters."""
    return _kept_or_read(source, source.cache, details=False)


def _details(source: Metrics) -> Table | None:
    """Telemetry of every scope."""
    cache = source.cache.with_name(source.cache.name.replace(CACHE, DETAILS)) if source.cache else None
    return _kept_or_read(source, cache, details=True).get("telemetry")


def _kept_or_read(source: Metrics, cache: Path | None, *, details: bool) -> Mapping[str, Table]:
    if cache and (kept := restore(cache, source.stamp)) is not None:
        return kept
    try:
        tables = tabulate.tabulate(source.path, source.stamp.size, details=details)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the metrics of a run: {error}") from error
    if cache and _prepare(cache):
        # Columns that cannot be kept (a full disk) cost time the next time, and nothing now.
        with suppress(OSError):
            save({kind: tables[kind] for kind in tables if not details or kind == "telemetry"}, source.stamp, cache)
    return tables


def _prepare(cache: Path) -> bool:
    """Make the folder of the columns; False where that cannot be written to."""
    try:
        cache.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(cache.parent, os.W_OK)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} should hold a JSON object, and holds {type(data).__name__}")
    return data


def _assemble(folder: Path, source: Metrics | None) -> Run:
    return Run(
        name=folder.resolve().name,
        path=folder,
        config=_read(folder / "config.json") or {},
        environment=_read(folder / "environment.json") or {},
        result=_read(folder / "result.json"),
        tables=_tables(source) if source else {},
        details=partial(_details, source) if source else None,
    )
