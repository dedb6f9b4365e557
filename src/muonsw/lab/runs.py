"""Read a run: its config, environment, result, and every recorded number as a column.

A run in progress loads up to its last record. A JSONL file that `muonsw.Telemetry` wrote in a user's own loop is a
run without a config.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muonsw.lab.errors import UsageError
from muonsw.lab.files import parse_json, read_object
from muonsw.lab.train.checkpoint import CONFIG, ENVIRONMENT, METRICS, RESULT
from muonsw.lab.train.config import RunConfig

try:
    from orjson import loads
except ModuleNotFoundError:  # `Findings` must work without the lab extra; this is three times slower
    loads = parse_json  # type: ignore[assignment]

Values = NDArray[np.float64]
Points = tuple[NDArray[np.int64], Values]
Tables = Mapping[str, Mapping[str, "Columns"]]  # by kind of record and by scope
NAN = float("nan")
NOTHING: Points = (np.empty(0, np.int64), np.empty(0))
SCOPES = ("decayed", "all")  # pooled over the weights that decay, and over all weights
SPLIT = {"roles": "role", "layers": "layer", "parameters": "parameter"}  # keys of telemetry with one scope per entry
LARGEST_STEP = float(1 << 53)
# The decay rule is inferred from the ratio, phi/lr or phi/lr^2, that is constant to this tolerance; the learning rate
# must have varied by at least this factor.
SAME_RATIO, VARIES = 0.01, 1.1
REMEDIES = {
    CONFIG: "restore the run's config.json",
    ENVIRONMENT: "delete it: it is only displayed, and a resumed run rewrites it",
    RESULT: "delete it and rerun the command of the run, which rewrites it",
}
ADVICE = "name a folder that `muonsw train` wrote, or a JSONL file that `muonsw.Telemetry` wrote"


class Columns(dict[str, Values]):
    """Records of one kind as columns: each key has an array with one value per record.

    Missing values are NaN; a list such as `groups` becomes `groups.0.lr` and so on.

    Examples:
        >>> columns = Columns({"step": np.array([1.0, 2.0]), "loss": np.array([3.5, np.nan])})
        >>> columns.step.tolist(), columns["loss"].tolist(), sorted(columns)
        ([1, 2], [3.5, nan], ['loss', 'step'])
    """

    @property
    def step(self) -> NDArray[np.int64]:
        return self["step"].astype(np.int64) if "step" in self else np.empty(0, np.int64)

    @property
    def records(self) -> int:
        return len(next(iter(self.values()), ()))

    def known(self, key: str) -> Points:
        """Return the steps and values at which a key is finite; both are empty if it was never recorded."""
        if key not in self or "step" not in self:
            return NOTHING
        finite = np.isfinite(self[key])
        return self.step[finite], self[key][finite]


def tabulate(records: Iterable[Any], *, details: bool = True) -> Tables:
    """Turn records into columns by kind and scope, with or without telemetry of roles, layers and parameters.

    The last record of each step counts.
    """
    by_step: dict[str, dict[float, dict[str, dict[str, float]]]] = {}  # by kind, step, scope and key
    for record in records:
        if not isinstance(record, dict):
            raise ValueError("not a JSON object")
        step = record.get("step")
        if not isinstance(step, int | float) or not 0 <= step < LARGEST_STEP:
            raise ValueError("it has no step")
        scopes: dict[str, Any] = {"": record}
        if "all" in record:  # telemetry
            scopes = {"": {key: value for key, value in record.items() if key not in (*SCOPES, *SPLIT)}}
            scopes |= {scope: record.get(scope) for scope in SCOPES}
            for key, name in SPLIT.items() if details else ():
                parts = record.get(key)
                scopes |= {f"{name}:{p}": v for p, v in parts.items()} if isinstance(parts, dict) else {key: parts}
        for scope, values in scopes.items():
            if not isinstance(values, dict | None):
                raise ValueError(f"{scope[:60]!r} is not a JSON object")
        numbers = {scope: _numbers(values) for scope, values in scopes.items() if values is not None}
        by_step.setdefault(str(record.get("kind", "")), {})[step] = numbers
    return {kind: _columns(rows) for kind, rows in by_step.items()}


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Collect the numbers in a JSON object; those in lists and objects have dotted names."""
    numbers: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, int | float):
            numbers[key] = float(value)
        elif isinstance(value, dict | list):
            parts = value if isinstance(value, dict) else {str(place): item for place, item in enumerate(value)}
            numbers |= {f"{key}.{part}": number for part, number in _numbers(parts).items()}
    return numbers


def _columns(rows: Mapping[float, Mapping[str, Mapping[str, float]]]) -> dict[str, Columns]:
    """Build the columns of all scopes; each also has those of the whole record, such as the step."""
    ordered = [rows[step] for step in sorted(rows)]
    columns: dict[str, Columns] = {}
    for scope in dict.fromkeys(scope for row in ordered for scope in row):
        parts = [row.get(scope, {}) for row in ordered]
        keys = dict.fromkeys(key for part in parts for key in part)
        columns[scope] = Columns(columns.get("", {}))
        columns[scope] |= {key: np.array([part.get(key, NAN) for part in parts]) for key in keys}
    return columns


def read_metrics(path: Path, *, details: bool = False) -> Tables:
    """Tabulate a JSONL file; an incomplete last line is skipped, and a file that does not exist has no records."""
    number = 0

    def records(file: Iterable[bytes]) -> Iterator[Any]:
        nonlocal number
        for number, line in enumerate(file, start=1):  # noqa: B007 (errors name it)
            try:
                if line.strip():
                    yield loads(line)
            except ValueError as error:
                if line.endswith(b"\n"):
                    raise ValueError(f"not JSON ({error})") from None

    try:
        with path.open("rb") as file:
            return tabulate(records(file), details=details)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, OverflowError) as error:
        raise UsageError(f"cannot read {path}: line {number}: {error}; delete that line, or the file") from error


@dataclass(frozen=True)
class Run:
    """A run folder or a JSONL file of telemetry; unknown numbers are NaN."""

    name: str
    path: Path
    settings: dict[str, Any]  # config.json; empty for a file
    environment: dict[str, Any]  # environment.json; may be empty
    result: dict[str, Any] | None  # result.json; None before the end of the run and for a file
    tables: Tables  # records by kind and scope
    metrics_path: Path | None = None  # where the records of roles, layers and parameters are, if not in `tables`

    @property
    def train(self) -> Columns:
        return self.tables.get("train", {}).get("", Columns())

    @property
    def evals(self) -> Columns:
        return self.tables.get("eval", {}).get("", Columns())

    @property
    def telemetry(self) -> Columns:
        """What telemetry records of the whole step."""
        return self.scope("")

    def scope(self, scope: str) -> Columns:
        """Return telemetry of `all`, `decayed`, `role:NAME`, `layer:NUMBER` or `parameter:NAME`; empty if unknown."""
        scopes = self.tables.get("telemetry", {}) if scope in ("", *SCOPES) else self._detailed
        return scopes.get(scope, Columns())

    def scopes(self) -> list[str]:
        return [scope for scope in self._detailed if scope]

    @cached_property
    def _detailed(self) -> Mapping[str, Columns]:
        """Telemetry of every scope; most of the file, so read on demand."""
        tables = self.tables if self.metrics_path is None else read_metrics(self.metrics_path, details=True)
        return tables.get("telemetry", {})

    @cached_property
    def config(self) -> RunConfig:
        """The settings as a config; raises `UsageError` if they do not make one."""
        try:
            return RunConfig.from_data(self.settings)
        except ValueError as error:
            raise UsageError(f"{self.path}: {error}") from error

    @property
    def arm(self) -> str:
        return str(self.settings.get("arm") or "")

    @property
    def seed(self) -> int:
        return int(self.settings.get("seed", 0))

    @property
    def unit(self) -> str:
        """Unit of the losses: nats for the decoder, otherwise unknown."""
        return "nats" if "optimizer" in self.settings and "task" not in self.settings else ""

    @property
    def metrics(self) -> list[str]:
        """Names of what evaluations measured other than the loss."""
        return [name for name in self.evals if name not in ("step", "loss")]

    def final_metric(self, name: str) -> float:
        """Return a metric at the last evaluation; NaN if it was not finite."""
        value = float(self.evals[name][-1]) if name in self.evals else NAN
        return value if np.isfinite(value) else NAN

    def named(self, arm: str) -> Run:
        """Return a copy with another arm name."""
        return replace(self, settings={**self.settings, "arm": arm})

    @property
    def complete(self) -> bool:
        return self.result is not None

    @property
    def planned_steps(self) -> int | None:
        """Steps in the config; None if unknown."""
        return self.settings.get("steps")

    @property
    def in_progress(self) -> bool:
        return self.planned_steps is not None and not self.complete

    @cached_property
    def rule(self) -> str:
        """The decay rule from the config, or inferred from the recorded decay; empty if unknown."""
        if named := (self.settings.get("optimizer") or {}).get("decay"):
            return str(named)
        decayed = self.scope("decayed")
        if "decay" not in decayed or "lr" not in decayed:
            return ""
        known = (decayed["decay"] > 0) & (decayed["lr"] > 0)
        phi, lr = decayed["decay"][known], decayed["lr"][known]
        if not len(lr) or lr.max() < VARIES * lr.min():
            return ""
        ratios = {"constant": phi / lr, "scaled": phi / lr**2}
        return next((rule for rule, ratio in ratios.items() if ratio.max() < (1.0 + SAME_RATIO) * ratio.min()), "")

    @property
    def steps(self) -> int:
        taken = self._result("steps")
        seen = [int(steps[-1]) for steps in (self.train.step, self.telemetry.step) if len(steps)]
        return int(taken) if np.isfinite(taken) else max(seen, default=0)

    @property
    def seconds(self) -> float:
        return self._result("seconds")

    @property
    def losses(self) -> Points:
        return self.evals.known("loss")

    @property
    def training_losses(self) -> Points:
        """Steps and training losses, without the terms that balance experts."""
        entropy = self.train.known("cross_entropy")
        return entropy if len(entropy[0]) else self.train.known("loss")

    @property
    def diverged(self) -> int | None:
        """The step at which the run diverged; None if it did not."""
        step = (self.result or {}).get("diverged")
        return step if isinstance(step, int) else None

    @property
    def final_loss(self) -> float:
        """The last validation loss, from the result or the latest so far; NaN if the run diverged."""
        return self._result("final_loss", last(self.losses)) if self.diverged is None else NAN

    @property
    def best_loss(self) -> float:
        return self._result("best_loss", min(self.losses[1].tolist(), default=NAN)) if self.diverged is None else NAN

    def recorded(self, key: str) -> Points:
        """Return steps and telemetry values of the weights that decay, or of all weights if none do."""
        scopes = (self.scope(scope).known(key) for scope in SCOPES)
        return next((points for points in scopes if len(points[0])), NOTHING)

    @property
    def norms(self) -> Points:
        """Steps and RMS of the weights that decay, before each step."""
        return self.recorded("weight_rms")

    @property
    def final_norm(self) -> float:
        return last(self.norms)

    @property
    def highest_norm(self) -> float:
        return max(self.norms[1].tolist(), default=NAN)

    @property
    def norm_change(self) -> float:
        """The last norm relative to the largest, minus one."""
        return self.final_norm / self.highest_norm - 1.0 if self.highest_norm > 0 else NAN

    def _result(self, key: str, otherwise: float = NAN) -> float:
        value = (self.result or {}).get(key, otherwise)  # null if it was not finite
        return float(value) if isinstance(value, int | float) else NAN


def last(points: Points) -> float:
    return float(points[1][-1]) if len(points[1]) else NAN


def load_run(path: str | Path) -> Run:
    """Load a run folder or a JSONL file of telemetry; what a run in progress has not written yet is empty."""
    path = Path(path)
    if path.is_file():
        tables = read_metrics(path)
        if not {"telemetry", "train", "eval"} & set(tables):
            raise UsageError(f"{path} has no records of a run; {ADVICE}")
        return Run(path.stem, path, {}, {}, None, tables, path)
    if not path.exists():
        raise UsageError(f"{path} is not a run: it does not exist; {ADVICE}")
    if not (path / CONFIG).is_file():
        inside = [str(folder.relative_to(path)) for folder in runs_below(path)]
        hint = f"it holds runs: {', '.join(inside[:3])}" if inside else ADVICE
        raise UsageError(f"{path} is not a run: it has no config.json; {hint}")
    settings, environment, result = (
        read_object(path / name, remedy=remedy) if os.path.lexists(path / name) else None
        for name, remedy in REMEDIES.items()
    )
    metrics = path / METRICS
    return Run(path.resolve().name, path, settings or {}, environment or {}, result, read_metrics(metrics), metrics)


def load_runs(paths: Iterable[str | Path]) -> list[Run]:
    return [load_run(path) for path in paths]


def runs_below(folder: Path) -> list[Path]:
    """List the run folders inside a folder or inside its `runs`, as `compare` leaves them."""
    configs = [path for depth in ("*", "runs/*") for path in folder.glob(f"{depth}/{CONFIG}") if path.is_file()]
    return sorted(path.parent for path in configs)


def unique_names(names: Iterable[str]) -> list[str]:
    """Number repeated names.

    Examples:
        >>> unique_names(["a", "b", "a"])
        ['a', 'b', 'a (2)']
    """
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return result
