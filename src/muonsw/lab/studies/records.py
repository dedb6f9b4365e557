"""Finished runs as rows of one flat JSONL table: settings, seed, losses, norms, total decay, and sampled curves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from muonsw.lab.arms import decay_factors
from muonsw.lab.config import flatten
from muonsw.lab.errors import UsageError
from muonsw.lab.files import locked, write_atomically
from muonsw.lab.model import ModelConfig
from muonsw.lab.runs import Columns, Run
from muonsw.lab.tasks import DataConfig
from muonsw.lab.train.config import RunConfig

# Settings that every row has, by their place in a run's config.
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
# How a run was watched and where it lay: no part of what it found.
HOUSEKEEPING = {
    *("version", "data.path", "device", "threads", "log_every", "checkpoint_every", "checkpoint_seconds", "keep"),
    *("eval_every", "tensorboard", "wandb", "compile", "graphs", "skipped", "diverged", "telemetry_every"),
}
RESULTS = ("epochs", "final_loss", "best_loss", "skipped", "diverged", "seconds", "state_bytes")
MADE_WITH = ("device", "torch", "muonsw", "transformers", "timm")
# Curves are kept of runs with at least this many evaluations or samples.
EVALUATIONS, SAMPLES = 10, 100
SAMPLED = ("weight_rms", "update_rms", "decay", "lr")
SAMPLED_DECAYED = (*SAMPLED, "alignment_update", "alignment_gradient", "alignment_momentum", "defect")
SAMPLED_NORMALIZED = (*SAMPLED, "gradient_rms")


def row(run: Run, **about: Any) -> dict[str, Any]:
    """A run as one flat row; other settings than `COLUMNS` have their dotted name, where they are not the default."""
    settings = flatten(run.settings)
    named = {name: settings.get(path) for name, path in COLUMNS.items()}
    known = {*COLUMNS.values(), *HOUSEKEEPING}
    others = {path: value for path, value in settings.items() if path not in known and value != USUAL.get(path)}
    result = {name: (run.result or {}).get(name) for name in RESULTS}
    norms = {"end_norm": short(run.final_norm), "highest_norm": short(run.highest_norm)}
    total = short(math.fsum(decay_factors(run.config, run.config.optimizer)), 6)
    metrics = {f"final.{name}": short(run.final_metric(name)) for name in run.metrics}
    made_with = {name: run.environment.get(name) for name in MADE_WITH}
    found = {"total_decay": total, **result, **norms, **metrics, **made_with, **_curves(run)}
    flat = {**about, **named, **others, **found} | about
    return {name: value for name, value in flat.items() if value not in (None, "", [])}


def _curves(run: Run) -> dict[str, list[float | None]]:
    """Losses over steps, and telemetry of the weights that decay and of those that a normalization follows."""
    found: dict[str, list[float | None]] = {}
    if run.evals.records >= EVALUATIONS:
        found |= {"eval.step": run.evals.step.tolist(), "eval.loss": [short(one, 6) for one in run.evals["loss"]]}
    for name, scope, columns in (
        ("decayed", run.telemetry.scope("decayed"), SAMPLED_DECAYED),
        ("normalized", run.normalized if run.config.task is None else Columns(), SAMPLED_NORMALIZED),
    ):
        if scope.records >= SAMPLES:
            found[f"{name}.step"] = scope.step.tolist()
            found |= {f"{name}.{key}": [short(one) for one in scope[key]] for key in columns if key in scope}
    return found


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a table.

    Raises:
        UsageError: If the file is not one.
    """
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        if all(isinstance(one, dict) and {"steps", "seed", "decay"} <= set(one) for one in rows):
            return rows
        raise ValueError("a line is not a run")
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a table of runs ({error}): name another file") from error


def append(path: Path, runs: Sequence[Run], **about: Any) -> int:
    """Add runs to a table, those that it has already left out, and return how many were added."""
    path.parent.mkdir(parents=True, exist_ok=True)
    busy = f"another process is writing {path}: wait for it, then run the same command again"
    with locked(path.parent, busy, wait=60.0):
        written = path.read_text(encoding="utf-8") if path.exists() else ""
        known = {_key(one) for one in (read(path) if written else [])}
        new = [made for run in runs if _key(made := row(run, **about)) not in known]
        lines = "".join(json.dumps(one, separators=(",", ":")) + "\n" for one in new)
        write_atomically(path, written + lines)
    return len(new)


def _key(one: dict[str, Any]) -> str:
    """What sets a run apart: its settings but for the names of arm and text, and the loss that it ended at."""
    names = {*COLUMNS, "final_loss"} - {"arm", "text"}
    return json.dumps({name: one[name] for name in sorted(names & one.keys())})


def short(value: float, digits: int = 5) -> float | None:
    """A number with few digits; None where it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
