"""Runs exported to a file of JSON lines and read back: what the runs on one text, or of tasks, found, without weights.

The first line says on which text, and has the settings of a run in full; every other line has a run's settings where
they differ, its result, its evaluations, its telemetry where that was sampled often, and what it was made with.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from muonsw.lab.config import flatten
from muonsw.lab.errors import UsageError
from muonsw.lab.files import locked, write_atomically
from muonsw.lab.runs.metrics import Columns
from muonsw.lab.runs.run import NORMALIZED, SCOPES, Run
from muonsw.lab.tasks import TaskConfig
from muonsw.lab.train.config import OptimizerConfig, RunConfig
from muonsw.lab.train.folder import identity

# Telemetry is kept of runs that were sampled so often, and of it these columns.
SAMPLES = 100
SAMPLED = (
    *("weight_rms", "update_rms", "decay", "alignment_update", "alignment_gradient", "alignment_momentum"),
    *("defect", "lr", "gradient_rms"),
)
OF_NORMALIZED = ("weight_rms", "update_rms", "gradient_rms", "decay", "lr")
DIGITS = 5
# Seconds in which another process that adds runs to a file is done with it.
PATIENCE = 60.0
MADE_WITH = ("device", "python", "torch", "muonsw", "transformers", "timm")


class Records:
    """The runs of one text, or of tasks, by identity; `base` has what a run has unless its line says otherwise."""

    def __init__(self, path: Path, header: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        self.path, self.header = path, dict(header)
        self.base = RunConfig.from_data(self.header["config"])
        self.lines: list[Mapping[str, Any]] = []
        self.runs: dict[str, Run] = {}
        self._take(lines)

    @classmethod
    def read(cls, path: Path) -> Records:
        """Read a file back.

        Raises:
            UsageError: If it holds something else.
        """
        try:
            header, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            return cls(path, header, lines)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} holds no records of runs ({error}): name another file") from error

    @classmethod
    def open(cls, path: Path, config: RunConfig, **about: Any) -> Records:
        """Read a file, or begin one for runs on the tokens of this config, or for runs of tasks.

        Raises:
            UsageError: If it holds runs on other tokens.
        """
        with _held(path):
            if not path.exists():
                text = {} if config.task else {"fingerprint": config.tokens.fingerprint}
                write_atomically(path, json.dumps({**about, **text, "config": _usual(config).as_data()}) + "\n")
            found = cls.read(path)
        ours, theirs = (_text(one) for one in (config, found.base))
        if theirs != ours:
            other = f"{path} has runs on other text ({theirs})"
            raise UsageError(f"{other} than --data has ({ours}): give that text, or another --out")
        return found

    def ready(self, config: RunConfig) -> RunConfig:
        """A planned run as it is on this text and this kind of machine."""
        model, data = replace(config.decoder, vocab=self.base.decoder.vocab), self.base.tokens
        data = replace(config.tokens, path="", fingerprint=data.fingerprint)
        return replace(config, model=model, data=data, device=self.base.device, threads=self.base.threads)

    def find(self, config: RunConfig) -> Run | None:
        """The run that a study plans, if it was made, or one that differs in being sampled more often alone."""
        wanted = self.ready(config)
        if (run := self.runs.get(identity(wanted))) is not None:
            return run
        often = (replace(wanted, telemetry_every=every) for every in self.sampled if every < wanted.telemetry_every)
        found = (self.runs.get(identity(one)) for one in often)
        return next((run for run in found if run is not None), None)

    @property
    def sampled(self) -> set[int]:
        """Updates between samples that runs of this file have."""
        return {run.config.telemetry_every for run in self.runs.values()}

    def add(self, runs: Sequence[Run], **about: Any) -> None:
        """Export runs to the file, to which other processes may have added theirs meanwhile."""
        if all(identity(run.config) in self.runs for run in runs):
            return
        with _held(self.path):
            written = self.path.read_text(encoding="utf-8")
            self._take(map(json.loads, written.splitlines()[1 + len(self.lines) :]))
            new = {identity(run.config): {**self._line(run), **about} for run in runs}
            lines = [line for name, line in new.items() if name not in self.runs]
            write_atomically(self.path, written + "".join(json.dumps(line) + "\n" for line in lines))
            self._take(lines)

    def _take(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            run = self._run(line)
            self.lines.append(line)
            self.runs[identity(run.config)] = run

    def _line(self, run: Run) -> dict[str, Any]:
        usual = flatten(self.header["config"])
        settings = flatten(run.settings if "task" in run.settings else _without_place(run.settings))
        norms = {"end_norm": _short(run.final_norm), "highest_norm": _short(run.highest_norm)}
        return {
            "settings": {name: value for name, value in settings.items() if usual.get(name) != value},
            "result": {**(run.result or {}), **{name: norm for name, norm in norms.items() if norm is not None}},
            **({"metrics": run.metrics} if run.metrics else {}),
            "losses": [row for row in _rows(run.evals, ("loss", *run.metrics)) if row[0]],
            **_telemetry(run),
            "made_with": {name: run.environment[name] for name in MADE_WITH if run.environment.get(name)},
        }

    def _run(self, line: Mapping[str, Any]) -> Run:
        settings = _nested(flatten(self.header["config"]) | line["settings"])
        tables: dict[str, dict[str, Columns]] = {
            "eval": {"": _columns(("step", "loss", *line.get("metrics", ())), line["losses"])}
        }
        if "samples" in line:
            tables["telemetry"] = dict.fromkeys(("", *SCOPES), _columns(line["sampled"], line["samples"]))
        if NORMALIZED in line:
            tables["telemetry"][NORMALIZED] = _columns(("step", *OF_NORMALIZED), line[NORMALIZED])
        return Run(settings.get("arm") or "", self.path, settings, {}, dict(line["result"]), tables)


def _held(path: Path) -> AbstractContextManager[object]:
    busy = f"another process holds the folder of {path}: end it, then run the same command again"
    return locked(path.parent, busy, wait=PATIENCE)


def _usual(config: RunConfig) -> RunConfig:
    """The settings that lines leave out.

    The optimizer's are defaults: those that are saved only where they are chosen must not pass to other runs.
    """
    if config.task is not None:
        return RunConfig(task=TaskConfig(""))
    return replace(config, data=replace(config.tokens, path=""), optimizer=OptimizerConfig(), arm="")


def _text(config: RunConfig) -> str | None:
    return "of tasks" if config.task else config.tokens.fingerprint


def _without_place(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**settings, "data": {**settings["data"], "path": ""}, "arm": ""}


def _telemetry(run: Run) -> dict[str, Any]:
    scope = run.telemetry.scope(SCOPES[0])
    if scope.records < SAMPLES:
        return {}
    found = {"sampled": ["step", *SAMPLED], "samples": _rows(scope, SAMPLED)}
    normalized = run.normalized
    return {**found, NORMALIZED: _rows(normalized, OF_NORMALIZED)} if normalized.records else found


def _rows(scope: Columns, keys: Sequence[str]) -> list[list[float | None]]:
    columns = [scope.step, *(scope.get(key, np.full(scope.records, np.nan)) for key in keys)]
    return [[int(step), *map(_short, values)] for step, *values in zip(*columns, strict=True)]


def _columns(names: Sequence[str], rows: Sequence[Sequence[float | None]]) -> Columns:
    values = np.array([[math.nan if value is None else value for value in row] for row in rows], dtype=float)
    return Columns({name: values[:, place] if len(rows) else np.empty(0) for place, name in enumerate(names)})


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What `flatten` makes dotted names of.

    Examples:
        >>> _nested({"steps": 10, "optimizer.lr": 0.01})
        {'steps': 10, 'optimizer': {'lr': 0.01}}
    """
    found: dict[str, Any] = {}
    for name, value in flat.items():
        *parents, last = name.split(".")
        place = found
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = value
    return found


def _short(value: float) -> float | None:
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
