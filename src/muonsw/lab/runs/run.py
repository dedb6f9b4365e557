"""What a run recorded, once it is loaded: its losses, the norm of its weights, and how that changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from muonsw.lab.errors import UsageError
from muonsw.lab.files import read_object
from muonsw.lab.model import enters_norm
from muonsw.lab.runs.metrics import POOLED, Columns, Values, read_metrics
from muonsw.lab.theory import HypothesisError
from muonsw.lab.theory.tracking import NormHistory, predict_norms
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.folder import CONFIG, ENVIRONMENT, METRICS, RESULT

Points = tuple[NDArray[np.int64], Values]
NAN = float("nan")
NORMALIZED = "normalized"  # the scope of matrices whose output enters a normalization, in the record of a run
SCOPES = ("decayed", "all")  # what stands for a run: the weights that decay, or all where none do
RECURSION = ("weight_rms", "update_rms", "decay", "alignment_update")
NOTHING: Points = (np.empty(0, np.int64), np.empty(0))
REMEDIES = {
    CONFIG: "put the run's own config.json back",
    ENVIRONMENT: "delete it: it is only shown, and a run that goes on writes it anew",
    RESULT: "delete it, and the command that made the run writes it again",
}
# What is read of a run's settings besides showing them, and of which kind it must be.
SETTINGS: Mapping[str, Any] = {
    "steps": int,
    "seed": int,
    "arm": str,
    "optimizer": dict,
    "optimizer.algorithm": str,
    "optimizer.decay": str,
    **dict.fromkeys((f"optimizer.{name}" for name in ("lr", "weight_decay", "momentum")), int | float),
    "optimizer.betas": list,
    "optimizer.betas[0]": int | float,
}
# By how much a cosine in float32 may exceed 1.
ROUNDING = 1e-5
# No training takes more; the recursion goes through every update, and of a damaged record's it would take all memory.
MOST_UPDATES = 10_000_000
# How exactly phi/lr (or phi/lr^2) must stay the same for a run to have decayed by that rule, and how much the
# learning rate must change before the two can be told apart.
SAME_RATIO, VARIES = 0.01, 1.1


class Scopes:
    """What telemetry recorded, by scope: `all`, `decayed`, `role:NAME`, `layer:NUMBER`, `parameter:NAME`.

    Only the first two are read with the run; the others, which may be most of its file, once they are asked for.
    """

    def __init__(self, pooled: Mapping[str, Columns], details: Callable[[], Mapping[str, Columns]] | None = None):
        self._pooled = pooled
        self._details = details

    @cached_property
    def _whole(self) -> Mapping[str, Columns]:
        return self._pooled if self._details is None else self._details()

    @property
    def step(self) -> NDArray[np.int64]:
        """The updates that were recorded, ascending."""
        return self.scope("").step

    @property
    def skipped(self) -> Values:
        """How many updates had been skipped by then; not a number where that was not recorded."""
        return self.scope("").get("skipped", np.full(self.records, np.nan))

    @property
    def records(self) -> int:
        """How many updates were recorded."""
        return len(self.step)

    def scopes(self) -> list[str]:
        """Every scope that was recorded."""
        return [scope for scope in self._whole if scope]

    def scope(self, scope: str) -> Columns:
        """Everything recorded of a scope, with `step`; without columns where it is not known."""
        return (self._pooled if scope in ("", *POOLED) else self._whole).get(scope, Columns())


def pooled(parts: Sequence[Columns]) -> Columns:
    """Columns of several parameters as if their elements lay side by side: roots of mean squares, and means.

    Examples:
        >>> one = Columns(step=np.array([1.0]), numel=np.array([3.0]), weight_rms=np.array([2.0]), lr=np.array([0.1]))
        >>> two = Columns(step=np.array([1.0]), numel=np.array([1.0]), weight_rms=np.array([6.0]), lr=np.array([0.5]))
        >>> both = pooled([one, two])
        >>> round(float(both["weight_rms"][0]) ** 2, 6), round(float(both["lr"][0]), 6)
        (12.0, 0.2)
    """
    if not parts:
        return Columns()
    sizes = np.array([part["numel"] for part in parts])

    def mean(key: str, power: int) -> Values:
        values = np.array([part[key] for part in parts]) ** power
        found: Values = ((sizes * values).sum(axis=0) / sizes.sum(axis=0)) ** (1.0 / power)
        return found

    keys = [key for key in parts[0] if key.endswith("_rms") or key in ("decay", "lr")]
    return Columns({"step": parts[0]["step"], **{key: mean(key, 2 if key.endswith("_rms") else 1) for key in keys}})


@dataclass(frozen=True)
class Run:
    """A run folder, or the JSON lines that `muonsw.Telemetry` wrote in a user's own training loop, loaded."""

    name: str
    path: Path
    settings: dict[str, Any]  # as they were written; empty for a file
    environment: dict[str, Any]  # empty where it was not written
    result: dict[str, Any] | None  # what was written at the end; None until then, and for a file
    tables: Mapping[str, Mapping[str, Columns]]  # the records by kind and scope; of telemetry the pooled scopes
    details: Callable[[], Mapping[str, Columns]] | None = None  # reads the telemetry of all scopes

    @property
    def train(self) -> Columns:
        """One record for each logged update; without columns where there are none."""
        return self.tables.get("train", {}).get("", Columns())

    @property
    def evals(self) -> Columns:
        """One record for each evaluation; without columns where there are none."""
        return self.tables.get("eval", {}).get("", Columns())

    @cached_property
    def telemetry(self) -> Scopes:
        """What telemetry recorded of the weights."""
        return Scopes(self.tables.get("telemetry", {}), self.details)

    @cached_property
    def config(self) -> RunConfig:
        """What decided the run.

        Raises:
            UsageError: If its settings are not those of a run of this lab.
        """
        try:
            return RunConfig.from_data(self.settings)
        except ValueError as error:
            raise UsageError(f"{self.path}: {error}") from error

    @property
    def arm(self) -> str:
        """What a comparison calls it."""
        return str(self.settings.get("arm") or "")

    @property
    def seed(self) -> int:
        """Of its weights and batches."""
        return int(self.settings.get("seed", 0))

    @property
    def unit(self) -> str:
        """Of its losses: nats where it trained the decoder, and none that is known elsewhere."""
        return "nats" if "optimizer" in self.settings and "task" not in self.settings else ""

    @property
    def metrics(self) -> list[str]:
        """What evaluations measured besides the loss."""
        return [name for name in self.evals if name not in ("step", "loss")]

    def final_metric(self, name: str) -> float:
        """A metric at the last evaluation; not a number where it was not finite there, whatever it was before."""
        value = float(self.evals[name][-1]) if name in self.evals else NAN
        return value if np.isfinite(value) else NAN

    def named(self, arm: str) -> Run:
        """The same run under the name that a study has for its arm."""
        return replace(self, settings={**self.settings, "arm": arm})

    @property
    def complete(self) -> bool:
        """Whether the run wrote its result."""
        return self.result is not None

    @property
    def planned_steps(self) -> int | None:
        """How many updates the run was to take; None where nothing says so."""
        steps = self.settings.get("steps")
        return steps if isinstance(steps, int) else None

    @property
    def in_progress(self) -> bool:
        """Whether the run has a plan and has not ended."""
        return self.planned_steps is not None and not self.complete

    @cached_property
    def rule(self) -> str:
        """The decay rule: the configuration's, or as the recorded decay shows it; empty where neither says."""
        named = (self.settings.get("optimizer") or {}).get("decay")
        return str(named) if named else _rule_of(self.telemetry.scope("decayed"))

    @property
    def steps(self) -> int:
        """How many updates were taken."""
        taken = self._result("steps")
        seen = [int(steps[-1]) for steps in (self.train.step, self.telemetry.step) if len(steps)]
        return int(taken) if np.isfinite(taken) else max(seen, default=0)

    @property
    def lost_records(self) -> int:
        """How many updates at the end of a complete run have no records, beyond the usual distance of two of them."""
        seen = np.union1d(self.train.step, self.telemetry.step)
        if not self.complete or len(seen) < 2:
            return 0
        missing = self.steps - int(seen[-1])
        return missing if missing > np.diff(seen).max() else 0

    @property
    def tokens(self) -> float:
        """How many tokens were trained on; not a number where that is not known."""
        return self._result("tokens", last(self.train.known("tokens")))

    @property
    def seconds(self) -> float:
        """How long the run took; not a number where that is not known."""
        return self._result("seconds")

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state on a rank; not a number where that is not known."""
        return self._result("state_bytes")

    @property
    def losses(self) -> Points:
        """Steps and losses of the evaluations."""
        return self.evals.known("loss")

    @property
    def training_losses(self) -> Points:
        """Steps and losses of the batches, without the terms that only balance experts."""
        entropy = self.train.known("cross_entropy")
        return entropy if len(entropy[0]) else self.train.known("loss")

    @property
    def lost_losses(self) -> int:
        """How many logged updates had a loss that was not finite."""
        return int((~np.isfinite(self.train["loss"])).sum()) if "loss" in self.train else 0

    @property
    def final_loss(self) -> float:
        """The last validation loss: the result's, or the latest so far; not a number where there is none."""
        return self._result("final_loss", last(self.losses))

    @property
    def best_loss(self) -> float:
        """The smallest validation loss; not a number where there is none."""
        return self._result("best_loss", min(self.losses[1].tolist(), default=NAN))

    def recorded(self, key: str) -> Points:
        """Steps and values of what telemetry holds of the weights that decay, or of all where none do."""
        found = (self.telemetry.scope(scope).known(key) for scope in SCOPES)
        return next((points for points in found if len(points[0])), NOTHING)

    @property
    def epochs(self) -> float:
        """How often the run saw its text; not a number where its result does not say."""
        return self._result("epochs")

    @property
    def norms(self) -> Points:
        """Steps and root mean squares of the weights that decay, each before an update."""
        return self.recorded("weight_rms")

    @property
    def normalized(self) -> Columns:
        """Telemetry of the decoder's matrices whose output enters a normalization, pooled over their elements.

        A run folder has it parameter by parameter, the record of an exported run pooled.
        """
        if recorded := self.telemetry.scope(NORMALIZED):
            return recorded
        names = (scope for scope in self.telemetry.scopes() if scope.startswith("parameter:"))
        return pooled([self.telemetry.scope(name) for name in names if enters_norm(name.partition(":")[2])])

    @property
    def final_norm(self) -> float:
        """The last norm, of the record of an exported run or of telemetry; not a number where there is none."""
        return self._result("end_norm", last(self.norms))

    @property
    def norm_change(self) -> float:
        """The last norm over the largest, minus one; not a number where none was recorded."""
        largest = self.highest_norm
        return self.final_norm / largest - 1.0 if largest > 0 else NAN

    @property
    def highest_norm(self) -> float:
        """The largest norm, of the record or of telemetry; not a number where there is none."""
        return self._result("highest_norm", max(self.norms[1].tolist(), default=NAN))

    @property
    def predicted_norms(self) -> Points:
        """The norms that the recursion gives from the first one and the measured updates; empty where not recorded."""
        for samples in map(norm_history, map(self.telemetry.scope, SCOPES)):
            if samples is not None and len(samples) > 1:
                with suppress(HypothesisError, OverflowError):  # numbers that no training can have measured
                    return samples.steps.numpy(), predict_norms(samples).numpy()
        return NOTHING

    def _result(self, key: str, otherwise: float = NAN) -> float:
        value = (self.result or {}).get(key, otherwise)  # null where it was not finite
        return float(value) if isinstance(value, int | float) else NAN


def last(points: Points) -> float:
    """The last value; not a number where there is none."""
    return float(points[1][-1]) if len(points[1]) else NAN


def norm_history(columns: Columns) -> NormHistory | None:
    """The samples that have everything which the recursion of the norm needs; None where there are none."""
    if not all(key in columns for key in RECURSION):
        return None
    r, s, phi, a = (columns[key] for key in RECURSION)
    known = np.isfinite([r, s, phi, a]).all(axis=0) & (r > 0) & (phi >= 0) & (np.abs(a) < 1.0 + ROUNDING)
    known &= columns.step <= MOST_UPDATES
    if not known.any():
        return None
    r, s, phi, a = (column[known].tolist() for column in (r, s, phi, a.clip(-1.0, 1.0)))
    return NormHistory.of(columns.step[known].tolist(), r=r, s=s, phi=phi, a=a)


def _rule_of(decayed: Columns) -> str:
    """Which rule the recorded decay follows: phi goes with the learning rate, or with its square."""
    if not {"decay", "lr"} <= set(decayed):
        return ""
    phi, lr = decayed["decay"], decayed["lr"]
    known = np.isfinite(phi) & (phi > 0) & (lr > 0)
    phi, lr = phi[known], lr[known]
    if not len(lr) or lr.max() < VARIES * lr.min():
        return ""
    spreads = {"constant": phi / lr, "scaled": phi / lr**2}
    return next((rule for rule, ratio in spreads.items() if ratio.max() < (1.0 + SAME_RATIO) * ratio.min()), "")


def load_run(path: str | Path) -> Run:
    """Load a run folder, or a file of JSON lines; what a run in progress has not written yet is empty.

    Raises:
        UsageError: If it is neither, or cannot be read.
    """
    where = Path(path)
    if where.is_file():
        return _load_file(where)
    _require_folder(where)
    return Run(
        name=where.resolve().name,
        path=where,
        settings=_read_settings(where / CONFIG),
        environment=_read_json(where / ENVIRONMENT) or {},
        result=_read_json(where / RESULT),
        tables=_tables(where / METRICS),
        details=partial(_details, where / METRICS),
    )


def load_runs(paths: Iterable[str | Path]) -> list[Run]:
    """Load several, in the order given; one that is not a run is an error before any is read."""
    chosen = [Path(path) for path in paths]
    for path in chosen:
        if not path.is_file():
            _require_folder(path)
    return [load_run(path) for path in chosen]


def _load_file(path: Path) -> Run:
    tables = _tables(path)
    if not {"telemetry", "train", "eval"} & set(tables):
        advice = "name a folder that `muonsw train` wrote, or the JSON lines that a JsonlSink of muonsw.Telemetry wrote"
        raise UsageError(f"{path} is a file without records of a run; {advice}")
    return Run(path.stem, path, {}, {}, None, tables, partial(_details, path))


def _require_folder(folder: Path) -> None:
    advice = "name a folder that `muonsw train` wrote, or the JSON lines of a JsonlSink"
    if not folder.exists():
        raise UsageError(f"{folder} is not a run: it does not exist; {advice}")
    if not (folder / CONFIG).is_file():
        inside = [str(path.relative_to(folder)) for path in runs_below(folder)]
        begun = os.path.lexists(folder / METRICS) or os.path.lexists(folder / CONFIG)
        hint = f"it holds runs: {', '.join(inside[:3])}" if inside else REMEDIES[CONFIG] if begun else advice
        raise UsageError(f"{folder} is not a run: it has no config.json; {hint}")


def runs_below(folder: Path) -> list[Path]:
    """The run folders inside a folder, or inside its `runs`, where `compare` has them."""
    found = [path for depth in ("*", "runs/*") for path in folder.glob(f"{depth}/{CONFIG}") if path.is_file()]
    return sorted(path.parent for path in found)


def _tables(path: Path, *, details: bool = False) -> dict[str, dict[str, Columns]]:
    try:
        return read_metrics(path, details=details)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        reason = str(error) if str(path) in str(error) else f"{path}: {getattr(error, 'strerror', None) or error}"
        raise UsageError(f"cannot read the metrics of a run: {reason}; delete that line, or the file") from error


def _details(path: Path) -> Mapping[str, Columns]:
    return _tables(path, details=True).get("telemetry", {})


def _read_settings(path: Path) -> dict[str, Any]:
    """The settings of a run; those that are used here must be of the right kind."""
    config = _read_json(path) or {}
    optimizer = config.get("optimizer")
    named = {**config}
    if isinstance(optimizer, dict):
        named |= {f"optimizer.{key}": value for key, value in optimizer.items()}
        if isinstance(betas := optimizer.get("betas"), list):
            named["optimizer.betas[0]"] = next(iter(betas), None)
    for name, kind in SETTINGS.items():
        value = named.get(name)
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise UsageError(f"{path} has {name}={str(value)[:60]}; {REMEDIES[path.name]}")
    return config


def _read_json(path: Path) -> dict[str, Any] | None:
    return read_object(path, remedy=REMEDIES[path.name]) if path.exists() or path.is_symlink() else None
