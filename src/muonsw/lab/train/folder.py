"""A run's folder: its file names, its config, which never changes, and a description of the machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from muonsw import __version__, machine
from muonsw.lab.config import differences, flatten
from muonsw.lab.errors import UsageError
from muonsw.lab.files import read_object, write_json
from muonsw.lab.tasks import TaskConfig
from muonsw.lab.train.config import ParallelConfig, RunConfig

CONFIG, ENVIRONMENT, METRICS, RESULT = "config.json", "environment.json", "metrics.jsonl", "result.json"
CHECKPOINTS = "checkpoints"
PACKAGES = ("torch", "numpy", "matplotlib", "plotly", "transformers", "timm")
REMEDY = "put the run's own back, or delete it: checkpoints know their settings"

# Settings that change what is saved or shown, never a result. Data may move: their hash is compared. How ranks share
# the work only changes sums in their last digits.
HARMLESS = (
    *("keep", "checkpoint_every", "checkpoint_seconds", "tensorboard", "wandb", "data.path", "task.path"),
    *(f"parallel.{one.name}" for one in fields(ParallelConfig)),
)


def identity(config: RunConfig) -> str:
    """A short hash of everything that can change a number of a run: all settings, and the fingerprint of its tokens."""
    settings = {name: value for name, value in flatten(config.as_data()).items() if name not in (*HARMLESS, "arm")}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def _has_begun(folder: Path) -> bool:
    """Whether the config in a folder belongs to a run that took a step."""
    return os.path.lexists(folder / CONFIG) and any((folder / name).exists() for name in (CHECKPOINTS, METRICS, RESULT))


def recorded_code(folder: Path, task: TaskConfig) -> str | None:
    """The code hash of the task that a folder's run began with; None if it has no run of this task."""
    found = read_object(folder / CONFIG, remedy=REMEDY).get("task") if _has_begun(folder) else None
    if not isinstance(found, Mapping) or Path(str(found.get("path"))).name != task.name:
        return None
    return found.get("fingerprint")


def refuse_other_settings(folder: Path, config: RunConfig) -> None:
    if _has_begun(folder):
        refuse_changes(folder, read_object(folder / CONFIG, remedy=REMEDY), config)


def refuse_changes(where: Path, theirs: Any, config: RunConfig) -> None:
    """Raise a `UsageError` with the differences if recorded settings are not those of a config."""
    if not isinstance(theirs, Mapping):
        raise UsageError(f"{where} does not say which run it belongs to: delete it, or choose another folder")
    changed = differences(theirs, config.as_data())
    unwelcome = {name: pair for name, pair in changed.items() if name not in HARMLESS}
    if unwelcome:
        lines = "\n".join(f"  {name}: {old!r} there, {new!r} now" for name, (old, new) in unwelcome.items())
        fix = "resume with its own settings, choose another folder with --out, or delete it"
        raise UsageError(f"{where} holds a run with other settings; {fix}:\n{lines}")


def read_config_file(path: Path) -> RunConfig:
    """The run that a JSON file describes; a `UsageError` if it cannot be read or a setting is wrong."""
    try:
        return RunConfig.from_data(read_object(path))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def environment() -> dict[str, Any]:
    """Describe versions and the class of machine; nothing identifies it or its user."""
    installed: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return {
        "muonsw": __version__,
        "python": platform.python_version(),
        **installed,
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_cores": machine.cores(),
    }


def write_environment(folder: Path, **more: Any) -> None:
    """Record the machine, once the run has set its threads."""
    device = torch.cuda.get_device_name() if machine.gpus() else "cpu"
    now = {"device": device, "threads": torch.get_num_threads(), "command": sys.argv}
    write_json(folder / ENVIRONMENT, {**environment(), **now, **more})
