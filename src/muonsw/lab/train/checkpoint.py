"""Checkpoints: tensors in safetensors, the rest in JSON, each whole or not there, and checked when read.

A checkpoint is a folder `step-00000500`. It is written under another name, flushed to disk and renamed; its
`state.json` holds the checksums of the tensor files and one of itself, so that a flipped bit is found. Optimizer state
is stored under the names of the parameters. Several ranks write a file each (`pieces.py`); `load` puts them together,
so that both forms are read alike, and `save` of what was loaded is the conversion into the form of one process.
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
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from muonsw.distributed.shards import is_dtensor, shard_like
from muonsw.lab.base.errors import MachineError, UsageError
from muonsw.lab.base.storage import MAKE_ROOM, numbered, plain, read_object, reported, sync
from muonsw.lab.train.pieces import Reader, own_piece

if TYPE_CHECKING:
    from muonsw.lab.train.state import Training

STATE = "state.json"
PREFIX = "step-"
Tensors = dict[str, Tensor]


class CheckpointError(Exception):
    """A checkpoint that cannot be used, with its name and the reason."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on as if it had never stopped."""

    step: int  # completed updates
    tensors: Mapping[str, Tensors]  # files by name (`model`, `optimizer`, `random`), each a mapping of tensors
    state: Mapping[str, Any]  # plain data: learning-rate groups, schedule, evaluation so far


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint below a folder; what is already there is not touched.

    Raises:
        UsageError: If it cannot be written, for example because the disk is full.
    """
    final = final_name(folder, checkpoint.step)
    beside = folder / f".{final.name}.{os.getpid()}"
    with reported(final, remedy_in(folder)):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir()
            checksums = {name: write_part(beside, name, tensors) for name, tensors in checkpoint.tensors.items()}
            place(beside, final, {"step": checkpoint.step, "checksums": checksums, "state": checkpoint.state})
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    return final


def require_room(folder: Path, size: int) -> None:
    """Find out before the first update whether a checkpoint of so many bytes fits on the disk.

    Raises:
        MachineError: If it does not.
    """
    disk = shutil.disk_usage(folder)
    if disk.free < size and disk.total:  # a file system that does not say has neither
        room = f"a checkpoint takes {size / 1e6:,.2f} MB, and {disk.free / 1e6:,.2f} MB are free"
        raise MachineError(f"{folder} has no room for a checkpoint: {room}; {MAKE_ROOM}")


def remedy_in(folder: Path) -> str:
    """What to do where a checkpoint cannot be written below a folder, and what is left."""
    left = "earlier checkpoints are intact" if any(newest_first(folder)) else "no checkpoint had been saved"
    return f"make room on the disk; {left}"


def final_name(folder: Path, step: int) -> Path:
    """The name of a checkpoint."""
    return folder / f"{PREFIX}{step:08d}"


def place(beside: Path, final: Path, state: Mapping[str, Any]) -> None:
    """Add the JSON half to a folder of tensor files that are on disk, and give it the checkpoint's name."""
    content = plain(state)
    (beside / STATE).write_text(json.dumps({**content, "checksum": _digest(content)}), encoding="utf-8")
    sync(beside / STATE)
    sync(beside)
    remove(final)  # a damaged one, if any: a good one of this step would have been resumed from
    beside.rename(final)
    sync(final.parent)


def load(path: Path) -> Checkpoint:
    """Read a checkpoint, of one process or of several ranks, and check every byte of it.

    Raises:
        CheckpointError: If a part is missing, unreadable or altered.
    """
    return read_pieces(path, check(path), {})


def check(path: Path) -> dict[str, Any]:
    """Check every byte of a checkpoint without holding its tensors, and return its JSON half.

    Raises:
        CheckpointError: If a part is missing, unreadable or altered.
    """
    content = read_state(path)
    check_files(path, content["checksums"])
    return content


def check_files(path: Path, checksums: Mapping[str, str]) -> None:
    """Compare files of a checkpoint with their checksums.

    Raises:
        CheckpointError: If one is missing, unreadable or altered.
    """
    for name, checksum in checksums.items():
        file = path / f"{name}.safetensors"
        try:
            found = sha256(file)
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from error
        if found != checksum:
            raise CheckpointError(f"{file} does not match its checksum")


def read_pieces(path: Path, content: Mapping[str, Any], like: Mapping[str, Tensor]) -> Checkpoint:
    """The tensors of a checkpoint whose files have been checked, in the form of the parameters that they are for.

    Args:
        path: The checkpoint, of one process or of several ranks.
        content: Its JSON half.
        like: Parameters by name. Of a sharded one, and of its state, only this rank's shard is read.

    Raises:
        CheckpointError: If the files do not belong together.
    """
    index, ranks = content.get("index") or {}, content.get("ranks", 1)
    tensors: dict[str, Tensors] = {"model": {}, "optimizer": {}, "random": {}}
    try:
        for part, found in tensors.items():
            with Reader(path, part, index.get(part), ranks) as reader:
                for name in reader.names():
                    found[name] = _read_like(reader, name, like.get(name.partition("//")[0]))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError, SafetensorError) as error:
        raise CheckpointError(f"{path} is not one of ours: {error}") from error
    return Checkpoint(content["step"], tensors, content["state"])


def _read_like(reader: Reader, name: str, param: Tensor | None) -> Tensor:
    if param is None or not is_dtensor(param) or reader.shape(name) != tuple(param.shape):
        return reader.read(name)
    return shard_like(param.detach(), reader.read(name, own_piece(param)).to(param.device))


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
    """The checkpoints of a run under way: the newest whole ones and the best stay, damaged ones are put aside."""

    folder: Path  # where they are
    keep: int  # how many to keep besides the best
    note: Callable[[str], None]  # called with what was put aside or could not be deleted
    require_held: Callable[[], None] = lambda: None  # raises if the folder has been lost to another run
    _whole: set[Path] = field(default_factory=set)
    # Those of this run: there when it started, which refuses others, or its own.
    _known: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._known.update(newest_first(self.folder))

    def save(self, checkpoint: Checkpoint) -> None:
        """Add a checkpoint, then delete older ones and what killed processes left behind.

        Raises:
            UsageError: If it cannot be written, or the folder is another run's by now.
        """
        self.require_held()
        self.wrote(save(self.folder, checkpoint))

    def look(self) -> None:
        """Name a checkpoint that is on disk by now; here it was when `save` returned."""

    def finish(self) -> None:
        """Wait for a checkpoint that is on its way to the disk; here there is none."""

    def newest(self) -> Path | None:
        """What has the name of the newest checkpoint, whether or not it is whole."""
        return next(newest_first(self.folder), None)

    def load_into(self, training: Training, path: Path) -> None:
        """Let a run go on from a checkpoint.

        Raises:
            CheckpointError: If it is damaged or not of such a run.
        """
        training.load(load(path))

    def wrote(self, new: Path) -> None:
        """Count a new checkpoint, then delete older ones."""
        self._whole.add(new)
        self._known.add(new)
        whole = [path for path in newest_first(self.folder) if path in self._known and self._is_whole(path)]
        best = best_saved(whole)
        for path in whole[self.keep :]:
            if step_of(path) != best:
                self._delete(path)
        self.sweep()

    def sweep(self) -> None:
        """Delete what killed processes left behind: checkpoints half written or half deleted."""
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
                check(path)
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
    """Delete what has a checkpoint's name; of a link the link alone, whatever it points to.

    A folder loses its name first: killed half-way, this would leave half a checkpoint.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        doomed = path.with_name(f".{path.name}.deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def write_part(folder: Path, name: str, tensors: Tensors) -> str:
    """Write a file of tensors to disk, and return its checksum."""
    path = folder / f"{name}.safetensors"
    write_tensors(path, tensors)
    sync(path)
    return sha256(path)


def sha256(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a file of tensors; what the library says when the disk is full becomes an `OSError`."""
    path.touch()
    mode, saved, places = path.stat().st_mode, {}, set()
    for key, tensor in tensors.items():
        one = tensor.detach().cpu().contiguous()
        place = one.untyped_storage().data_ptr()
        saved[key] = one.clone() if place in places else one  # the library refuses tensors that overlap
        places.add(place)
    try:
        save_file(saved, path, metadata)
        path.chmod(mode)  # safetensors lets the owner alone read its files
    except SafetensorError as error:
        raise OSError(str(error)) from error


def read_tensors(path: Path) -> Tensors:
    """The tensors of a file; what is no such file becomes an `OSError`, as for `write_tensors`."""
    try:
        with Reader(path.parent, path.stem, None, ranks=1) as reader:
            return {name: reader.read(name) for name in reader.names()}
    except OSError:
        raise
    except Exception as error:  # a header that lies is refused in many ways: as a key, a value, a type, a file
        raise OSError(f"it is not a whole file of tensors ({error})") from error


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
