r"""Read a run: its config, environment, result, and every recorded number as a column.

A run in progress loads as far as it is written. A JSONL file that `muonsw.Telemetry` wrote in a user's own loop is a
run without a config.

Examples:
    >>> import pathlib, tempfile
    >>> folder = pathlib.Path(tempfile.mkdtemp()) / "first"
    >>> folder.mkdir()
    >>> _ = (folder / "config.json").write_text('{"steps": 2, "optimizer": {"decay": "scaled"}}')
    >>> _ = (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 2.5}\n{"kind": "tr')
    >>> run = load_run(folder)
    >>> run.name, run.rule, run.train["loss"].tolist(), run.final_loss, run.complete
    ('first', 'scaled', [2.5], nan, False)
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muonsw.lab.config import flatten
from muonsw.lab.errors import UsageError
from muonsw.lab.files import parse_json, read_object
from muonsw.lab.train.checkpoint import CONFIG, ENVIRONMENT, METRICS, RESULT
from muonsw.lab.train.config import RunConfig

try:
    from orjson import loads
except ModuleNotFoundError:  # on a machine that only trains; the replacement is three times slower
    loads = parse_json  # type: ignore[assignment]

Values = NDArray[np.float64]
Points = tuple[NDArray[np.int64], Values]
NAN = float("nan")
NOTHING: Points = (np.empty(0, np.int64), np.empty(0))
SCOPES = ("decayed", "all")  # pooled over the weights that decay, and over all weights
SPLIT = {"roles": "role", "layers": "layer", "parameters": "parameter"}  # keys of telemetry with one scope per entry
LARGEST_STEP = float(1 << 53)
# A run decayed by the rule whose ratio phi/lr (or phi/lr^2) is constant to this tolerance, provided that the learning
# rate varied by at least this factor.
SAME_RATIO, VARIES = 0.01, 1.1
REMEDIES = {
    CONFIG: "restore the run's config.json",
    ENVIRONMENT: "delete it: it is only displayed, and a resumed run rewrites it",
    RESULT: "delete it and rerun the command of the run, which rewrites it",
}
# Types of the settings used below.
SETTINGS: Mapping[str, Any] = {
    "steps": int,
    "seed": int,
    "arm": str,
    "optimizer": dict,
    "optimizer.algorithm": str,
    "optimizer.decay": str,
    **dict.fromkeys((f"optimizer.{name}" for name in ("lr", "weight_decay", "momentum", "betas")), int | float),
}
# Settings that may differ between runs of one arm.
WITHIN_ARM = (
    *("seed", "arm", "device", "threads", "compile", "keep", "tensorboard", "wandb"),
    *("checkpoint_every", "checkpoint_seconds"),
)
SYMBOLS = {"optimizer.weight_decay": "λ", "optimizer.lr": "η", "steps": "T", "model.width": "d"}
ADVICE = "name a folder that `muonsw train` wrote, or a JSONL file that `muonsw.Telemetry` wrote"
FIRST = ("optimizer.algorithm", "optimizer.preset", "optimizer.decay", "optimizer.weight_decay", "optimizer.lr")


class Columns(dict[str, Values]):
    """Records of one kind as columns: each key has an array with one value per record.

    Missing values are NaN; a list such as `load_entropy` becomes `load_entropy.0` and so on.

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


class _Cells:
    """Collect the numbers of one kind of record by scope and key, each with the index of its record."""

    def __init__(self) -> None:
        self.records = 0
        self.scopes: dict[str, dict[str, tuple[array[int], array[float]]]] = {"": {}}

    def add(self, scope: str, values: Mapping[str, Any], prefix: str = "") -> None:
        columns = self.scopes.setdefault(scope, {})
        for key, value in values.items():
            name = prefix + key
            if isinstance(value, int | float):
                places, numbers = columns.setdefault(name, (array("q"), array("d")))
                places.append(self.records)
                numbers.append(value)
            elif isinstance(value, list):
                self.add(scope, {str(place): item for place, item in enumerate(value)}, f"{name}.")
            elif isinstance(value, dict):
                self.add(scope, value, f"{name}.")

    def columns(self) -> dict[str, Columns]:
        """Build the columns of all scopes; the last record of each step counts."""
        arrays: dict[str, dict[str, Values]] = {}
        for scope, cells in self.scopes.items():
            arrays[scope] = {key: np.full(self.records, np.nan) for key in cells}
            for key, (places, numbers) in cells.items():
                arrays[scope][key][np.asarray(places)] = np.asarray(numbers)
        steps = arrays[""]["step"]
        _, from_end = np.unique(steps[::-1], return_index=True)
        last = len(steps) - 1 - from_end
        return {
            scope: Columns({key: column[last] for key, column in (arrays[""] | columns).items()})
            for scope, columns in arrays.items()
        }


def read_metrics(path: Path, *, details: bool) -> dict[str, dict[str, Columns]]:
    """Read a JSONL file into columns by kind of record and by scope; only telemetry has scopes other than "".

    Args:
        path: The file. An incomplete last line is skipped.
        details: Whether to read telemetry of roles, layers and parameters as well as the pooled scopes.

    Raises:
        ValueError: If another line is not a record.
    """
    tables: dict[str, _Cells] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = loads(line) if line.strip() else None
            except ValueError as error:
                if not line.endswith(b"\n"):
                    break
                raise ValueError(f"{path}, line {number} is not JSON ({error})") from None
            if record is None:
                continue
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {number} is not a JSON object: {line[:60].decode(errors='replace')}")
            step = record.get("step")
            if not isinstance(step, int | float) or not 0 <= step < LARGEST_STEP:
                raise ValueError(f"{path}: the record in line {number} has no step")
            cells = tables.setdefault(str(record.pop("kind", "")), _Cells())
            for name in (*SCOPES, *SPLIT) if "all" in record else ():
                scopes = {name: record.pop(name, None)}
                if name in SPLIT and isinstance(scopes[name], dict):
                    inner = scopes[name] if details else {}
                    scopes = {f"{SPLIT[name]}:{key}": value for key, value in inner.items()}
                for scope, values in scopes.items():
                    if isinstance(values, dict):
                        cells.add(scope, values)
                    elif values is not None:
                        raise ValueError(f"{path}: {scope[:60]!r} in line {number} is not a JSON object")
            cells.add("", record)
            cells.records += 1
    return {kind: cells.columns() for kind, cells in tables.items()}


class Scopes:
    """Telemetry by scope: `all`, `decayed`, `role:NAME`, `layer:NUMBER`, `parameter:NAME`.

    Only the first two are read with the run; the others may be most of the file and are read on demand.
    """

    def __init__(self, pooled: Mapping[str, Columns], details: Callable[[], Mapping[str, Columns]] | None = None):
        self._pooled = pooled
        self._details = details

    @cached_property
    def _every(self) -> Mapping[str, Columns]:
        return self._pooled if self._details is None else self._details()

    def scopes(self) -> list[str]:
        return [scope for scope in self._every if scope]

    def scope(self, scope: str) -> Columns:
        """Return the columns of a scope, including `step`; no columns if it is unknown."""
        return (self._pooled if scope in ("", *SCOPES) else self._every).get(scope, Columns())

    @property
    def step(self) -> NDArray[np.int64]:
        return self.scope("").step

    @property
    def records(self) -> int:
        return len(self.step)

    @property
    def skipped(self) -> Values:
        """Steps skipped so far at each record; NaN if not recorded."""
        return self.scope("").get("skipped", np.full(self.records, np.nan))


@dataclass(frozen=True)
class Run:
    """A run folder or a JSONL file of telemetry; unknown numbers are NaN."""

    name: str
    path: Path
    settings: dict[str, Any]  # config.json; empty for a file
    environment: dict[str, Any]  # environment.json; may be empty
    result: dict[str, Any] | None  # result.json; None before the end of the run and for a file
    tables: Mapping[str, Mapping[str, Columns]]  # records by kind and scope; only pooled scopes of telemetry
    details: Callable[[], Mapping[str, Columns]] | None = None  # reads all scopes of telemetry

    @property
    def train(self) -> Columns:
        return self.tables.get("train", {}).get("", Columns())

    @property
    def evals(self) -> Columns:
        return self.tables.get("eval", {}).get("", Columns())

    @cached_property
    def telemetry(self) -> Scopes:
        return Scopes(self.tables.get("telemetry", {}), self.details)

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
        decayed = self.telemetry.scope("decayed")
        phi, lr = (decayed.get(key, np.empty(0)) for key in ("decay", "lr"))
        if not len(phi) or not len(lr):
            return ""
        known = np.isfinite(phi) & (phi > 0) & (lr > 0)
        phi, lr = phi[known], lr[known]
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
    def lost_losses(self) -> int:
        """Number of logged steps with a non-finite loss."""
        return int((~np.isfinite(self.train["loss"])).sum()) if "loss" in self.train else 0

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
        scopes = (self.telemetry.scope(scope).known(key) for scope in SCOPES)
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
        largest = self.highest_norm
        return self.final_norm / largest - 1.0 if largest > 0 else NAN

    def _result(self, key: str, otherwise: float = NAN) -> float:
        value = (self.result or {}).get(key, otherwise)  # null if it was not finite
        return float(value) if isinstance(value, int | float) else NAN


def last(points: Points) -> float:
    return float(points[1][-1]) if len(points[1]) else NAN


def load_run(path: str | Path) -> Run:
    """Load a run folder or a JSONL file of telemetry; what a run in progress has not written yet is empty.

    Raises:
        UsageError: If it is neither, or cannot be read.
    """
    path = Path(path)
    if path.is_file():
        tables = _tables(path)
        if not {"telemetry", "train", "eval"} & set(tables):
            raise UsageError(f"{path} has no records of a run; {ADVICE}")
        return Run(path.stem, path, {}, {}, None, tables, partial(_details, path))
    _require_folder(path)
    settings = _read_json(path / CONFIG) or {}
    flat = flatten(settings)
    if isinstance(betas := flat.get("optimizer.betas", []), list):
        flat["optimizer.betas"] = next(iter(betas), None)  # only the first is used
    for name, kind in SETTINGS.items():
        value = flat.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UsageError(f"{path / CONFIG} has {name}={str(value)[:60]}; {REMEDIES[CONFIG]}")
    return Run(
        name=path.resolve().name,
        path=path,
        settings=settings,
        environment=_read_json(path / ENVIRONMENT) or {},
        result=_read_json(path / RESULT),
        tables=_tables(path / METRICS),
        details=partial(_details, path / METRICS),
    )


def load_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Load runs in this order; refuse paths that are not runs before reading any."""
    chosen = [Path(path) for path in paths]
    for path in chosen:
        if not path.is_file():
            _require_folder(path)
    return [load_run(path) for path in chosen]


def _require_folder(folder: Path) -> None:
    if not folder.exists():
        raise UsageError(f"{folder} is not a run: it does not exist; {ADVICE}")
    if not (folder / CONFIG).is_file():
        inside = [str(path.relative_to(folder)) for path in runs_below(folder)]
        hint = f"it holds runs: {', '.join(inside[:3])}" if inside else ADVICE
        if not inside and (folder / METRICS).exists():
            hint = REMEDIES[CONFIG]
        raise UsageError(f"{folder} is not a run: it has no config.json; {hint}")


def runs_below(folder: Path) -> list[Path]:
    """List the run folders inside a folder or inside its `runs`, as `compare` leaves them."""
    configs = [path for depth in ("*", "runs/*") for path in folder.glob(f"{depth}/{CONFIG}") if path.is_file()]
    return sorted(path.parent for path in configs)


def _tables(path: Path, *, details: bool = False) -> dict[str, dict[str, Columns]]:
    try:
        return read_metrics(path, details=details)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        reason = str(error) if str(path) in str(error) else f"{path}: {getattr(error, 'strerror', None) or error}"
        raise UsageError(f"cannot read the metrics of a run: {reason}; delete that line, or the file") from error


def _details(path: Path) -> Mapping[str, Columns]:
    return _tables(path, details=True).get("telemetry", {})


def _read_json(path: Path) -> dict[str, Any] | None:
    return read_object(path, remedy=REMEDIES[path.name]) if path.exists() or path.is_symlink() else None


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the keys whose values differ, with their values; a missing key is None.

    Examples:
        >>> differences([{"seed": 0, "steps": 9}, {"seed": 1, "steps": 9}])
        {'seed': [0, 1]}
    """
    flat = [flatten(config) for config in configs]
    keys = {key for config in flat for key in config}
    ordered = sorted(keys, key=lambda key: (FIRST.index(key) if key in FIRST else len(FIRST), key))
    columns = {key: [config.get(key) for config in flat] for key in ordered}
    return {key: values for key, values in columns.items() if len({json.dumps(v, default=str) for v in values}) > 1}


def name_arms(runs: Sequence[Run]) -> list[str]:
    """Name the arm of each run after its config, or after the settings that differ between arms.

    Runs that differ only in their seed share a name.
    """
    changed = differences([run.settings for run in runs])
    between = {key: values for key, values in changed.items() if key.rpartition(".")[2] not in WITHIN_ARM}
    names = []
    for place, run in enumerate(runs):
        words = [run.rule] if run.rule else []
        for key, values in between.items():
            value = values[place]
            if key != "optimizer.decay" and value is not None:
                text = f"{value:g}" if isinstance(value, float) else str(value)
                words.append(text if key in FIRST[:2] else f"{SYMBOLS.get(key, key.rpartition('.')[2])}={text}")
        names.append(run.arm or " ".join(words) or run.name)
    return names


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
