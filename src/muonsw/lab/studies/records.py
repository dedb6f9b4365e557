"""Finished runs as rows of a flat JSONL table: settings, seed, losses, norms, total decay, and sampled curves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from muonsw.lab.compare import decay_factors
from muonsw.lab.config import flatten
from muonsw.lab.errors import UsageError
from muonsw.lab.files import locked, write_atomically
from muonsw.lab.model import ModelConfig, enters_norm
from muonsw.lab.runs import Columns, Run
from muonsw.lab.tasks import DataConfig
from muonsw.lab.train.checkpoint import HARMLESS
from muonsw.lab.train.config import RunConfig

# Columns of every row, with the setting in a run's config that each holds.
COLUMNS = {
    "width": "model.width",
    "base_width": "model.mup.base_width",
    "batch": "batch",
    "steps": "steps",
    "seed": "seed",
    "algorithm": "optimizer.algorithm",
    "preset": "optimizer.preset",
    "decay": "optimizer.decay",
    "weight_decay": "optimizer.weight_decay",
    "lr": "optimizer.lr",
    "adam_lr": "optimizer.adam_lr",
    "muon_lr": "optimizer.muon_lr",
    "peak": "optimizer.peak",
    "norm": "optimizer.norm",
    "schedule": "schedule.shape",
    "final_fraction": "schedule.final_fraction",
    "decay_fraction": "schedule.decay_fraction",
    "weights": "weights",
    "arm": "arm",
    "task": "task.path",
    "options": "task.options",
    "text": "data.fingerprint",
}
USUAL = flatten(RunConfig(ModelConfig(width=64), DataConfig("")).as_data())
# How the names of settings of logging, storage and the machine begin, which no table needs.
HOUSEKEEPING = (
    *HARMLESS,
    *("version", "device", "threads", "log_every", "eval_every", "telemetry_every"),
    *("compile", "graphs", "skipped", "diverged"),
)
RESULTS = ("epochs", "final_loss", "best_loss", "skipped", "diverged", "seconds", "state_bytes")
MADE_WITH = ("device", "torch", "muonsw", "transformers", "timm")
# Only runs with at least this many evaluations or samples keep their curves.
EVALUATIONS, SAMPLES = 10, 100
SAMPLED = ("weight_rms", "update_rms", "decay", "lr")
SAMPLED_DECAYED = (*SAMPLED, "alignment_update", "alignment_gradient", "alignment_momentum", "defect")
SAMPLED_NORMALIZED = (*SAMPLED, "gradient_rms")


def row(run: Run, **about: Any) -> dict[str, Any]:
    """Flatten a run into one row; other settings appear under their dotted names if they are not the default."""
    settings, result = flatten(run.settings), run.result or {}
    flat: dict[str, Any] = {name: settings.get(path) for name, path in COLUMNS.items()}
    others = {path: value for path, value in settings.items() if path not in COLUMNS.values()}
    flat |= {k: v for k, v in others.items() if not k.startswith(HOUSEKEEPING) and v != USUAL.get(k)}
    flat["total_decay"] = short(math.fsum(decay_factors(run.config, run.config.optimizer)), 6)
    flat |= {name: result.get(name) for name in RESULTS}
    flat |= {"end_norm": short(run.final_norm), "highest_norm": short(run.highest_norm)}
    flat |= {f"final.{name}": short(run.final_metric(name)) for name in run.metrics}
    flat |= {name: run.environment.get(name) for name in MADE_WITH}

    # Losses over steps, and telemetry of decayed weights and of weights before a normalization.
    if run.evals.records >= EVALUATIONS:
        flat |= {"eval.step": run.evals.step.tolist(), "eval.loss": [short(loss, 6) for loss in run.evals["loss"]]}
    for name, scope, keys in (
        ("decayed", run.scope("decayed"), SAMPLED_DECAYED),
        ("normalized", normalized(run), SAMPLED_NORMALIZED),
    ):
        if scope.records >= SAMPLES:
            flat[f"{name}.step"] = scope.step.tolist()
            flat |= {f"{name}.{key}": [short(value) for value in scope[key]] for key in keys if key in scope}
    flat = {**about, **flat, **about}  # `about` comes first, and replaces columns of the same names
    return {name: value for name, value in flat.items() if value not in (None, "", [])}


def normalized(run: Run) -> Columns:
    """Telemetry of the decoder's matrices whose output is normalized, pooled over elements."""
    names = (scope for scope in run.scopes() if scope.startswith("parameter:"))
    parts = [run.scope(name) for name in names if enters_norm(name.partition(":")[2])]
    if run.config.task is not None or not parts:
        return Columns()
    shares = np.array([part["numel"] for part in parts])
    shares = shares / shares.sum(axis=0)
    columns = {"step": parts[0]["step"]}
    for key in parts[0]:
        if key.endswith("_rms"):
            columns[key] = np.sqrt((shares * np.array([part[key] for part in parts]) ** 2).sum(axis=0))
        elif key in ("decay", "lr"):
            columns[key] = (shares * np.array([part[key] for part in parts])).sum(axis=0)
    return Columns(columns)


def read(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a table; raise a `UsageError` if the file is not a table of runs."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if all(isinstance(record, dict) and {"steps", "seed", "decay"} <= set(record) for record in rows):
            return rows
        raise ValueError("a line is not a run")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a table of runs ({error}): name another file") from error


def append(path: Path, runs: Sequence[Run], **about: Any) -> int:
    """Append the runs that are not yet in a table; return how many were added."""

    def identity(record: dict[str, Any]) -> str:
        # All settings except the names of arm and text, and the final loss.
        names = {*COLUMNS, "final_loss"} - {"arm", "text"}
        return json.dumps({name: record[name] for name in sorted(names & record.keys())})

    path.parent.mkdir(parents=True, exist_ok=True)
    busy = f"another process is writing {path}: wait for it, then rerun the same command"
    with locked(path.parent, busy, wait=60.0):
        written = path.read_text(encoding="utf-8") if path.exists() else ""
        known = {identity(record) for record in (read(path) if written else [])}
        new = [record for record in (row(run, **about) for run in runs) if identity(record) not in known]
        lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in new)
        write_atomically(path, written + lines)
    return len(new)


def short(value: float, digits: int = 5) -> float | None:
    """Round to a few digits; None if not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
