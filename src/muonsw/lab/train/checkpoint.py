"""A run's folder: its config, which never changes, a description of the machine, and its checkpoints.

A checkpoint is a folder `step-00000500`: tensors in safetensors, the rest in JSON. It is written under another name,
flushed to disk and renamed; its `state.json` holds the checksums of the tensor files and of itself. Optimizer state is
stored under the names of the parameters. Rank 0 gathers and writes whole tensors, so a checkpoint does not depend on
the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
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
from muonsw.lab.train.config import ParallelConfig, RunConfig

if TYPE_CHECKING:
    from muonsw.lab.train.ranks import World
    from muonsw.lab.train.state import Training


STATE, PREFIX = "state.json", "step-"
PARTS = ("model", "optimizer", "random")
CONFIG, ENVIRONMENT, METRICS, RESULT = "config.json", "environment.json", "metrics.jsonl", "result.json"
CHECKPOINTS = "checkpoints"
PACKAGES = ("torch", "numpy", "matplotlib", "plotly", "transformers", "timm")
REMEDY = "put the run's own back, or delete it: checkpoints know their settings"
# Settings that change what is saved or shown, never a result. Data may move: their hash is compared. How ranks share
# the work only changes sums in their last digits.
HARMLESS = (
    *("keep", "checkpoint_every", "checkpoint_seconds", "tensorboard", "wandb", "data.path", "task.path"),
    *(f"parallel.{setting.name}" for setting in fields(ParallelConfig)),
)
Tensors = dict[str, Tensor]


# ---- Settings and machine


def identity(config: RunConfig) -> str:
    """A short hash of everything that can change a number of a run: all settings, and the fingerprint of its tokens."""
    settings = {name: value for name, value in flatten(config.as_data()).items() if name not in (*HARMLESS, "arm")}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:10]


def recorded_code(folder: Path, task: TaskConfig) -> str | None:
    """The code hash of the task that a folder's run began with; None if it has no run of this task."""
    recorded = (_recorded_settings(folder) or {}).get("task")
    if not isinstance(recorded, Mapping) or Path(str(recorded.get("path"))).name != task.name:
        return None
    return recorded.get("fingerprint")


def refuse_other_settings(folder: Path, config: RunConfig) -> None:
    if (settings := _recorded_settings(folder)) is not None:
        refuse_changes(folder, settings, config)


def _recorded_settings(folder: Path) -> dict[str, Any] | None:
    """The settings of the run that a folder holds; None unless it has taken a step."""
    begun = any((folder / name).exists() for name in (CHECKPOINTS, METRICS, RESULT))
    return read_object(folder / CONFIG, remedy=REMEDY) if begun and os.path.lexists(folder / CONFIG) else None


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


# ---- Checkpoints on disk


class CheckpointError(Exception):
    """A checkpoint that cannot be used, with its name and the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to resume as if it had never stopped."""

    step: int  # completed
    tensors: Mapping[str, Tensors]  # by file: `model`, `optimizer`, `random`
    state: Mapping[str, Any]  # plain data: learning-rate groups, schedule, evaluation so far


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint below a folder, without touching the others there.

    Raises:
        MachineError: If it cannot be written, for example because the disk is full.
    """
    final = folder / f"{PREFIX}{checkpoint.step:08d}"
    unfinished = folder / f".{final.name}.{os.getpid()}"
    saved = "earlier checkpoints are intact" if any(newest_first(folder)) else "no checkpoint had been saved"
    with reported(final, f"make room on the disk; {saved}"):
        try:
            folder.mkdir(exist_ok=True)  # not its parents: a run whose folder was deleted must not make it again
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            checksums = {}
            for name, tensors in checkpoint.tensors.items():
                path = unfinished / f"{name}.safetensors"
                write_tensors(path, tensors)
                sync(path)
                checksums[name] = sha256(path)
            content = plain({"step": checkpoint.step, "checksums": checksums, "state": checkpoint.state})
            (unfinished / STATE).write_text(json.dumps({**content, "checksum": _digest(content)}), encoding="utf-8")
            sync(unfinished / STATE)
            sync(unfinished)
            shutil.rmtree(final, ignore_errors=True)  # a damaged one, if any: a good one would have been resumed from
            unfinished.rename(final)
            sync(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return final


def load(path: Path) -> Checkpoint:
    """Read a checkpoint, and check every byte of it.

    Raises:
        CheckpointError: If a part is missing, unreadable or altered.
        UsageError: If it has the format of another version.
    """
    content, tensors = read_state(path), {}
    for part in PARTS:
        file = path / f"{part}.safetensors"
        try:
            if sha256(file) != content["checksums"][part]:
                raise CheckpointError(f"{file} does not match its checksum")
            tensors[part] = read_tensors(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    return Checkpoint(content["step"], tensors, content["state"])


def read_state(path: Path) -> dict[str, Any]:
    """Read and check the JSON half of a checkpoint; raises as `load`."""
    try:
        content = read_object(path / STATE)
    except UsageError as error:
        raise CheckpointError(str(error)) from error
    if content.pop("checksum", None) != _digest(content) or content["step"] != step_of(path):
        raise CheckpointError(f"{path / STATE} does not match its checksum")
    if "index" in content:
        old = f"{path} was written by {content.get('ranks')} ranks with a muonsw 0.1.0 that kept one file for each rank"
        raise UsageError(f"{old}: resume it with that version on one process until it saves again, or delete it")
    return content


def newest_first(folder: Path) -> list[Path]:
    """All checkpoints below a folder, damaged ones included, ordered by step."""
    named = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    return sorted(named, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def best_saved(paths: Iterable[Path]) -> int | None:
    """The step of the checkpoint with the lowest validation loss."""
    measured = []
    for path in paths:
        with suppress(CheckpointError):
            content = read_state(path)
            step, loss = content["state"]["latest"]
            if step == content["step"] and loss is not None:  # a run that was stopped saves without evaluating
                measured.append((loss, step))
    return min(measured)[1] if measured else None


@dataclass(frozen=True)
class Shelf:
    """The checkpoints of a run in progress: keep the newest and the best, put damaged ones aside.

    Every method is called on all ranks; rank 0 writes the folder.
    """

    folder: Path
    keep: int  # how many to keep besides the best
    note: Callable[[str], None]  # called with what was put aside or could not be deleted
    world: World

    def save(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, then delete older ones."""

        def write() -> None:
            save(self.folder, checkpoint)
            paths = newest_first(self.folder)
            best = best_saved(paths)
            for path in paths[self.keep :]:
                if step_of(path) != best:
                    # Renamed first, so that a process killed half-way leaves no half checkpoint.
                    doomed = path.with_name(f".{path.name}.deleted")
                    try:
                        path.rename(doomed)
                        shutil.rmtree(doomed)
                    except OSError as error:
                        self.note(f"{path} cannot be deleted: {error.strerror or error}")

        self.world.leading(write)

    def newest(self) -> Path | None:
        """The newest checkpoint, damaged or not."""
        return self.world.from_leader(next(iter(newest_first(self.folder)), None))

    def resume(self, training: Training) -> None:
        """Load the newest checkpoint that is good; put damaged ones aside, and refuse one of another run."""

        def sweep() -> None:  # what killed processes left half written or half deleted
            for path in self.folder.glob(f".{PREFIX}*"):
                shutil.rmtree(path, ignore_errors=True)

        def take(path: Path) -> None:
            saved = load(path)
            refuse_changes(path, saved.state.get("config"), training.config)
            training.load(saved)

        def put_aside(path: Path, damage: CheckpointError) -> None:
            aside = numbered(path.with_name(f"damaged-{path.name}"))
            with reported(path):
                path.rename(aside)
            self.note(f"damaged checkpoint left out: {damage}; it is now {aside}")

        self.world.leading(sweep)
        while (path := self.newest()) is not None:
            try:
                self.world.together(partial(take, path))
            except CheckpointError as error:
                self.world.leading(partial(put_aside, path, error))
            else:
                self.note(f"resuming after step {training.step}, from {path}")
                return


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of tensors; errors of safetensors, such as a full disk, become an `OSError`."""
    path.touch()
    mode, saved, places = path.stat().st_mode, {}, set()
    for key, tensor in tensors.items():
        dense = tensor.detach().cpu().contiguous()
        place = dense.untyped_storage().data_ptr()
        saved[key] = dense.clone() if place in places else dense  # safetensors refuses tensors that overlap
        places.add(place)
    try:
        save_file(saved, path)
        path.chmod(mode)  # safetensors lets only the owner read its files
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_tensors(path: Path) -> Tensors:
    """Read a file of tensors; anything else becomes an `OSError`."""
    try:
        return load_file(path)
    except OSError:
        raise
    except Exception as error:  # safetensors refuses a bad header with many kinds of errors
        raise OSError(f"it is not a whole file of tensors ({error})") from error


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def gather(tensors: Mapping[str, Tensor], *, keep: bool) -> Tensors:
    """Gather each tensor from all ranks; only a rank that writes keeps it, on the host."""
    on_host = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor.detach())
        if keep:
            on_host[name] = full.cpu()
    return on_host


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor; a collective if it is sharded."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def sharded_like(param: Tensor, tensor: Tensor) -> Tensor:
    """Shard a tensor that every rank has read like a parameter of its shape; no rank waits for another."""
    if not hasattr(param, "device_mesh") or tensor.shape != param.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor  # slow to import

    return distribute_tensor(tensor.to(param.device), param.device_mesh, param.placements, src_data_rank=None)  # type: ignore[attr-defined]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[Tensors, list[dict[str, Any]]]:
    """An optimizer's state as tensors by `parameter//key`, and its groups as plain data."""
    saved = optimizer.state_dict()
    names = [name for group in saved["param_groups"] for name in group["param_names"]]
    tensors = {
        f"{names[number]}//{key}": value for number, state in saved["state"].items() for key, value in state.items()
    }
    return tensors, plain(saved["param_groups"])


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Tensors, groups: list[dict[str, Any]]) -> None:
    """Load the state that `optimizer_tensors` returned."""

    def by_name(groups: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            name: member for group in groups for name, member in zip(group["param_names"], group["params"], strict=True)
        }

    numbers, params = by_name(groups), by_name(optimizer.param_groups)
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.partition("//")
        state.setdefault(numbers[name], {})[entry] = sharded_like(params[name], tensor)
    # JSON has no tuples.
    for group in groups:
        group.update({key: tuple(group[key]) for key in ("betas", "split_sizes") if group.get(key) is not None})
    optimizer.load_state_dict({"state": state, "param_groups": groups})
