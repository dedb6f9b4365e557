"""Checkpoints: tensors in safetensors, the rest in JSON, each whole or not there, and checked when read.

A checkpoint is a folder `step-00000500`. It is written under another name, flushed to disk and renamed; its
`state.json` holds the checksums of the tensor files and one of itself, so that a flipped bit is found. Optimizer state
is stored under the names of the parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import load_file, save_file
from torch import Tensor

from muonsw.lab.errors import UsageError
from muonsw.lab.storage import numbered, plain, read_object, reported, sync

STATE = "state.json"
PREFIX = "step-"
Tensors = dict[str, Tensor]


class CheckpointError(Exception):
    """A checkpoint that cannot be used, with its name and the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on as if it had never stopped.

    Attributes:
        step: Completed updates.
        tensors: Files by name (`model`, `optimizer`, `random`), each a mapping of tensors.
        state: Plain data: learning-rate groups, schedule, evaluation so far.
    """

    step: int
    tensors: Mapping[str, Tensors]
    state: Mapping[str, Any]


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint below a folder; what is already there is not touched.

    Raises:
        UsageError: If it cannot be written, for example because the disk is full.
    """
    final = folder / f"{PREFIX}{checkpoint.step:08d}"
    beside = folder / f".{final.name}.{os.getpid()}"
    with reported(final, "make room on the disk; earlier checkpoints are intact"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            checksums = {name: _write_part(beside, name, tensors) for name, tensors in checkpoint.tensors.items()}
            content = plain({"step": checkpoint.step, "checksums": checksums, "state": checkpoint.state})
            (beside / STATE).write_text(json.dumps({**content, "checksum": _digest(content)}), encoding="utf-8")
            sync(beside / STATE)
            sync(beside)
            remove(final)  # a damaged one, if any: a good one of this step would have been resumed from
            beside.rename(final)
            sync(folder)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return final


def load(path: Path) -> Checkpoint:
    """Read a checkpoint and check every byte of it.

    Raises:
        CheckpointError: If a part is missing, unreadable or altered.
    """
    content = read_state(path)
    tensors = {}
    for name, checksum in content["checksums"].items():
        file = path / f"{name}.safetensors"
        try:
            with file.open("rb") as opened:
                if hashlib.file_digest(opened, "sha256").hexdigest() != checksum:
                    raise CheckpointError(f"{file} does not match its checksum")
            tensors[name] = read_tensors(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
    return Checkpoint(content["step"], tensors, content["state"])


def read_state(path: Path) -> dict[str, Any]:
    """The JSON half of a checkpoint, checked.

    Raises:
        CheckpointError: If it is missing, unreadable or altered.
    """
    try:
        content = read_object(path / STATE)
    except UsageError as error:
        raise CheckpointError(str(error)) from error
    if content.pop("checksum", None) != _digest(content):
        raise CheckpointError(f"{path / STATE} does not match its checksum")
    parts = (content.get("checksums"), content.get("state"))
    if not all(isinstance(part, dict) for part in parts) or content.get("step") != step_of(path):
        raise CheckpointError(f"{path / STATE} is not the state after update {step_of(path)}")
    return content


def newest_first(folder: Path) -> Iterator[Path]:
    """What has a checkpoint's name below a folder, by step, whatever file times say and whether or not it is whole."""
    found = [path for path in folder.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit()]
    yield from sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step that a checkpoint's name says.

    Examples:
        >>> step_of(Path("checkpoints/step-00000500"))
        500
    """
    return int(path.name.removeprefix(PREFIX))


def best_saved(paths: Iterable[Path]) -> int | None:
    """The step of the checkpoint with the lowest validation loss."""
    measured = []
    for path in paths:
        with suppress(CheckpointError, KeyError, TypeError, ValueError):  # the last three: of another program
            content = read_state(path)
            step, loss = content["state"]["latest"]
            if step == content["step"] and loss is not None:  # a run that was stopped saves without evaluating
                measured.append((loss, step))
    return min(measured)[1] if measured else None


@dataclass(frozen=True)
class Shelf:
    """The checkpoints of a run under way: the newest whole ones and the best stay, damaged ones are put aside.

    Attributes:
        folder: Where they are.
        keep: How many to keep besides the best.
        note: Is told what was put aside or could not be deleted.
    """

    folder: Path
    keep: int
    note: Callable[[str], None] = lambda _text: None
    _whole: set[Path] = field(default_factory=set)

    def save(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, then delete older ones and what killed processes left behind.

        Raises:
            UsageError: If it cannot be written.
        """
        self._whole.add(save(self.folder, checkpoint))
        whole = [path for path in newest_first(self.folder) if self._is_whole(path)]
        best = best_saved(whole)
        for path in whole[self.keep :]:
            if step_of(path) != best:
                self._delete(path)
        for path in self.folder.glob(f".{PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)

    def put_aside(self, path: Path, damage: CheckpointError) -> None:
        """Give a damaged checkpoint another name, under which it counts no more, and say so."""
        aside = numbered(path.with_name(f"damaged-{path.name}"))
        with reported(path):
            path.rename(aside)
        self.note(f"damaged checkpoint left out: {damage}; it is now {aside}")

    def _is_whole(self, path: Path) -> bool:
        """Whether a checkpoint can be loaded; it is read for this once, and not at all if this process wrote it."""
        if path not in self._whole:
            try:
                load(path)
            except CheckpointError as error:
                self.put_aside(path, error)
                return False
            self._whole.add(path)
        return True

    def _delete(self, path: Path) -> None:
        try:
            remove(path)
        except OSError as error:
            self.note(f"{path} cannot be deleted: {error.strerror or error}")


def remove(path: Path) -> None:
    """Delete what has a checkpoint's name; of a link the link alone, whatever it points to."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _write_part(folder: Path, name: str, tensors: Tensors) -> str:
    path = folder / f"{name}.safetensors"
    write_tensors(path, tensors)
    sync(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a file of tensors; what the library says when the disk is full becomes an `OSError`."""
    try:
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path, metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_tensors(path: Path) -> Tensors:
    """The tensors of a file; what is no such file becomes an `OSError`, as for `write_tensors`."""
    try:
        str(path).encode()
    except UnicodeEncodeError:  # the library opens only names in UTF-8
        source: Any = path.read_bytes()
        read: Any = load_bytes
    else:
        source, read = path, load_file
    try:
        tensors: Tensors = read(source)
    except OSError:
        raise
    except Exception as error:  # a header that lies is refused in many ways: as a key, a value, a type, a file
        raise OSError(f"it is not a whole file of tensors ({error})") from error
    return tensors


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
    numbers = {
        name: number for group in groups for name, number in zip(group["param_names"], group["params"], strict=True)
    }
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        name, _, entry = key.partition("//")
        state.setdefault(numbers[name], {})[entry] = tensor
    restored = [
        {key: tuple(value) if key in _TUPLES and value is not None else value for key, value in group.items()}
        for group in groups
    ]
    optimizer.load_state_dict({"state": state, "param_groups": restored})


_TUPLES = ("betas", "split_sizes")
