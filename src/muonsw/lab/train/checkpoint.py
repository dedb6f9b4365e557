"""A run's folder: its config, a description of the machine, and its checkpoints.

A checkpoint is a folder `step-00000500`: tensors in safetensors, the rest in JSON. It is written under a temporary
name, flushed to disk and renamed; its `state.json` holds the checksums of the tensor files and of itself. Optimizer
state is stored under parameter names. Rank 0 writes unsharded tensors, so a run can resume on any number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from muonsw import __version__, machine
from muonsw.lab.config import differences, flatten
from muonsw.lab.errors import UsageError
from muonsw.lab.files import numbered, plain, read_object, reported, sync
from muonsw.lab.tasks import TaskConfig
from muonsw.lab.train.config import RunConfig

if TYPE_CHECKING:
    from muonsw.lab.train.ranks import World
    from muonsw.lab.train.state import Training


STATE, PREFIX = "state.json", "step-"
PARTS = ("model", "optimizer", "random")
CONFIG, ENVIRONMENT, METRICS, RESULT = "config.json", "environment.json", "metrics.jsonl", "result.json"
CHECKPOINTS = "checkpoints"
PACKAGES = ("torch", "numpy", "matplotlib", "plotly", "transformers", "timm")
REMEDY = "put the original back, or delete it: checkpoints also record their settings"
# How the names of settings begin that never change a result. Data may move, because its hash is compared; how ranks
# share the work only changes the rounding of sums.
HARMLESS = ("keep", "checkpoint_", "tensorboard", "wandb", "data.path", "task.path", "parallel.")
Tensors = dict[str, Tensor]


# ---- Settings and machine


def identity(config: RunConfig) -> str:
    """A short hash of all settings that can change a result, including the fingerprint of the tokens."""
    settings = {
        name: value for name, value in flatten(config.as_data()).items() if not name.startswith((*HARMLESS, "arm"))
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def recorded_code(folder: Path, task: TaskConfig) -> str | None:
    """The hash of the task's file when the run in this folder started; None without one."""
    recorded = (recorded_settings(folder) or {}).get("task")
    if not isinstance(recorded, Mapping) or Path(str(recorded.get("path"))).name != task.name:
        return None
    return recorded.get("fingerprint")


def recorded_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of the run in a folder; None if it has not taken a step."""
    started = any((folder / name).exists() for name in (CHECKPOINTS, METRICS, RESULT))
    return read_object(folder / CONFIG, remedy=REMEDY) if started and os.path.lexists(folder / CONFIG) else None


def refuse_changes(where: Path, recorded: Mapping[str, Any] | None, config: RunConfig) -> None:
    """Raise a `UsageError` that lists the settings in which a config differs from the recorded ones, if any."""
    changed = {} if recorded is None else differences(recorded, config.as_data())
    lines = [
        f"  {name}: {old!r} there, {new!r} now" for name, (old, new) in changed.items() if not name.startswith(HARMLESS)
    ]
    if lines:
        fix = "resume with its own settings, choose another folder with --out, or delete it"
        raise UsageError("\n".join([f"{where} holds a run with other settings; {fix}:", *lines]))


def read_config_file(path: Path) -> RunConfig:
    """Read a run's settings from a JSON file."""
    try:
        return RunConfig.from_data(read_object(path))
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from error


def environment() -> dict[str, Any]:
    """Versions and the kind of machine; nothing that identifies the machine or its user."""
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


# ---- Checkpoints on disk


class CheckpointError(Exception):
    """A checkpoint is unusable; the message names it and the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to resume as if it had never stopped."""

    step: int  # completed
    tensors: Mapping[str, Tensors]  # by file: `model`, `optimizer`, `random`
    state: Mapping[str, Any]  # plain data


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint into a folder; raise a `MachineError` if that fails, for example because the disk is full."""
    final = folder / f"{PREFIX}{checkpoint.step:08d}"
    unfinished = folder / f".{final.name}.{os.getpid()}"
    with reported(final, "make room on the disk; earlier checkpoints are intact"):
        try:
            folder.mkdir(exist_ok=True)  # not its parents: if the user has deleted the run, it must not reappear
            unfinished.mkdir()
            checksums = {}
            for name, tensors in checkpoint.tensors.items():
                path = unfinished / f"{name}.safetensors"
                path.touch()
                mode = path.stat().st_mode
                try:
                    save_file(dict(tensors), path)
                except SafetensorError as error:  # a full disk, for example
                    raise OSError(str(error)) from error
                path.chmod(mode)  # safetensors makes files that only their owner can read
                sync(path)
                checksums[name] = sha256(path)
            content = plain({"step": checkpoint.step, "checksums": checksums, "state": checkpoint.state})
            (unfinished / STATE).write_text(json.dumps({**content, "checksum": _digest(content)}), encoding="utf-8")
            sync(unfinished / STATE)
            sync(unfinished)
            shutil.rmtree(final, ignore_errors=True)  # if it exists, it is damaged: the run did not resume from it
            unfinished.rename(final)
            sync(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return final


def load(path: Path) -> Checkpoint:
    """Read a checkpoint and verify its checksums; damage raises a `CheckpointError`."""
    try:
        content = read_object(path / STATE)
    except UsageError as error:
        raise CheckpointError(str(error)) from error
    if content.pop("checksum", None) != _digest(content) or content["step"] != step_of(path):
        raise CheckpointError(f"{path / STATE} does not match its checksum")
    tensors = {}
    for part in PARTS:
        file = path / f"{part}.safetensors"
        try:
            if sha256(file) != content["checksums"][part]:
                raise CheckpointError(f"{file} does not match its checksum")
            tensors[part] = read_tensors(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    return Checkpoint(content["step"], tensors, content["state"])


def newest_first(folder: Path) -> list[Path]:
    """All checkpoints in a folder, including damaged ones, newest first."""
    paths = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(paths, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


@dataclass(frozen=True)
class Shelf:
    """The checkpoints of a run in progress: keeps the newest, and moves damaged ones aside.

    Call every method on all ranks; rank 0 does the writing.
    """

    folder: Path
    keep: int  # how many to keep
    note: Callable[[str], None]  # shows a message to the user
    world: World

    def save(self, checkpoint: Checkpoint) -> None:

        def write() -> None:
            metrics = self.folder.parent / METRICS
            with reported(metrics):
                sync(metrics)  # records must be on disk before the checkpoint that follows them
            save(self.folder, checkpoint)
            for path in newest_first(self.folder)[self.keep :]:
                # Rename first: if the process is killed here, no partial checkpoint is left.
                doomed = path.with_name(f".{path.name}.deleted")
                with reported(path):
                    path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)  # the next start tries again

        self.world.leading(write)

    def newest(self) -> Path | None:
        """The newest checkpoint, damaged or not."""
        return self.world.leading(lambda: next(iter(newest_first(self.folder)), None))

    def resume(self, training: Training) -> None:
        """Load the newest intact checkpoint, if any; move damaged ones aside, and refuse one of another run."""

        def delete_partial() -> None:  # left by killed processes
            for path in self.folder.glob(f".{PREFIX}*"):
                shutil.rmtree(path, ignore_errors=True)

        def load_into_run(path: Path) -> None:
            saved = load(path)
            refuse_changes(path, saved.state["config"], training.config)
            training.load(saved)

        def move_aside(path: Path, damage: CheckpointError) -> None:
            aside = numbered(path.with_name(f"damaged-{path.name}"))
            with reported(path):
                path.rename(aside)
            self.note(f"skipping a damaged checkpoint: {damage}; it is now {aside}")

        self.world.leading(delete_partial)
        while (path := self.newest()) is not None:
            try:
                self.world.together(partial(load_into_run, path))
            except CheckpointError as error:
                self.world.leading(partial(move_aside, path, error))
            else:
                self.note(f"resuming after step {training.step}, from {path}")
                return


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(path: Path) -> Tensors:
    """Read a safetensors file; raise an `OSError` if it is damaged."""
    try:
        return load_file(path)
    except OSError:
        raise
    except Exception as error:  # safetensors raises many kinds of errors for a bad header
        raise OSError(f"it is not a complete safetensors file ({error})") from error


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor from all ranks if it is sharded."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def sharded_like(param: Tensor, tensor: Tensor) -> Tensor:
    """Shard a full tensor like a parameter, if shapes agree; every rank has the tensor, so ranks do not communicate."""
    if not hasattr(param, "device_mesh") or tensor.shape != param.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor  # slow to import

    return distribute_tensor(tensor.to(param.device), param.device_mesh, param.placements, src_data_rank=None)  # type: ignore[attr-defined]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[Tensors, list[dict[str, Any]]]:
    """Split an optimizer's state into tensors named `parameter//key` and groups as plain data."""
    saved = optimizer.state_dict()
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    tensors = {
        f"{names[number]}//{key}": value for number, state in saved["state"].items() for key, value in state.items()
    }
    return tensors, plain(saved["param_groups"])


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors, groups: list[dict[str, Any]]) -> None:
    """Load the state that `optimizer_tensors` returned."""
    here = optimizer.param_groups
    params = {name: p for group in here for name, p in zip(group["param_names"], group["params"], strict=True)}
    state: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.partition("//")
        state.setdefault(name, {})[entry] = sharded_like(params[name], tensor)
    named = [{**group, "params": group["param_names"]} for group in groups]  # names are also valid keys of a state
    optimizer.load_state_dict({"state": state, "param_groups": named})
