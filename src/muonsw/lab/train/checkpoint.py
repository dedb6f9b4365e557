"""Checkpoints: tensors in safetensors, the rest in JSON; written atomically, and verified when they are read.

A checkpoint is a folder `step-00000500`. It is written under another name, flushed to disk and renamed; its
`state.json` holds the checksums of the tensor files and of itself. Optimizer state is stored under the names of the
parameters. Rank 0 gathers and writes whole tensors, so a checkpoint does not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from muonsw.lab.files import numbered, plain, read_object, reported, sync, write_json
from muonsw.lab.tasks import TaskConfig
from muonsw.lab.train.config import ParallelConfig, RunConfig

if TYPE_CHECKING:
    from muonsw.lab.train.ranks import World
    from muonsw.lab.train.state import Training

STATE, PREFIX = "state.json", "step-"
PARTS = ("model", "optimizer", "random")
Tensors = dict[str, Tensor]


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
    check(path)
    return read(path)


def check(path: Path) -> None:
    """Check every byte of a checkpoint without holding its tensors; raises as `load`."""
    for name, checksum in read_state(path)["checksums"].items():
        file = path / f"{name}.safetensors"
        try:
            intact = sha256(file) == checksum
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
        if not intact:
            raise CheckpointError(f"{file} does not match its checksum")


def read(path: Path) -> Checkpoint:
    """Read a checkpoint that has been checked."""
    content = read_state(path)
    try:
        tensors = {part: read_tensors(path / f"{part}.safetensors") for part in PARTS}
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error
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


def newest_first(folder: Path) -> Iterator[Path]:
    """Everything with a checkpoint's name below a folder, damaged ones included, by step and not by file time."""
    named = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    yield from sorted(named, key=step_of, reverse=True)


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

    Every method is called on all ranks; rank 0 reads and writes the folder.
    """

    folder: Path
    keep: int  # how many to keep besides the best
    note: Callable[[str], None]  # called with what was put aside or could not be deleted
    world: World

    def save(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, then delete older ones."""

        def write() -> None:
            save(self.folder, checkpoint)
            paths = list(newest_first(self.folder))
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
        return self.world.from_leader(next(newest_first(self.folder), None))

    def resume(self, training: Training) -> None:
        """Load the newest checkpoint that is good; put damaged ones aside, and refuse one of another run."""

        def sweep() -> None:  # what killed processes left half written or half deleted
            for path in self.folder.glob(f".{PREFIX}*"):
                shutil.rmtree(path, ignore_errors=True)

        def load(path: Path) -> None:
            saved = read(path)
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
                self.world.leading(partial(check, path))
                self.world.together(partial(load, path))
            except CheckpointError as error:
                self.world.leading(partial(put_aside, path, error))
            else:
                self.note(f"resuming after step {training.step}, from {path}")
                return


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of tensors; raise an `OSError` for whatever safetensors says when the disk is full."""
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
    """Read a file of tensors; raise an `OSError` if it is something else."""
    try:
        return load_file(path)
    except OSError:
        raise
    except Exception as error:  # safetensors refuses a bad header with many kinds of errors
        raise OSError(f"it is not a whole file of tensors ({error})") from error


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> Tensors:
    """Bring each tensor together from all ranks, and keep it on the host of those that write it."""
    on_host = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if keep:
            on_host[name] = full.cpu()
    return on_host


def whole(tensor: Tensor) -> Tensor:
    """A tensor brought together from all ranks; a collective if it is sharded."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full


def sharded_like(param: Tensor, tensor: Tensor) -> Tensor:
    """A tensor that every rank has read, placed like a parameter of its shape; no rank waits for another."""
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
    """Give an optimizer the state that `optimizer_tensors` took from one like it."""

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
    tuples = ("betas", "split_sizes")
    restored = [
        {key: tuple(value) if key in tuples and value is not None else value for key, value in group.items()}
        for group in groups
    ]
    optimizer.load_state_dict({"state": state, "param_groups": restored})


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
