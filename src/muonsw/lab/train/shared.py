"""Checkpoints that all ranks write together, each its own pieces, while training goes on.

    every rank   copy pieces to the host, then write them in a thread: folder beside, file, fsync, checksum
    all ranks    once an update: are all threads done?
    rank 0       index and checksums into state.json, fsync, rename, delete older ones

A folder without its final name is nothing: whichever rank dies at whichever point, it is deleted by the next start.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from muonsw.distributed.shards import local
from muonsw.lab.base.errors import MachineError
from muonsw.lab.base.storage import reported
from muonsw.lab.train.checkpoint import (
    PREFIX,
    Checkpoint,
    CheckpointError,
    Shelf,
    check_files,
    final_name,
    newest_first,
    place,
    read_pieces,
    read_state,
    remedy_in,
    write_part,
)
from muonsw.lab.train.pieces import file_name, merged, own_pieces
from muonsw.lab.train.world import World
from muonsw.matrices import Region

if TYPE_CHECKING:
    from muonsw.lab.train.state import Training

Files = dict[str, dict[str, Tensor]]


class PendingCheckpoint(NamedTuple):
    """A checkpoint on its way to the disk: what it holds, and this rank's share of the work."""

    checkpoint: Checkpoint
    beside: Path
    pieces: dict[str, dict[str, Region]]
    written: Future[dict[str, str]]


class SharedShelf:
    """The checkpoints of a run on several ranks; every method is called on all of them.

    Args:
        shelf: What rank 0 keeps and deletes.
        world: The ranks.
    """

    def __init__(self, shelf: Shelf, world: World) -> None:
        self.folder, self.shelf, self.world = shelf.folder, shelf, world
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: PendingCheckpoint | None = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Copy this rank's pieces and begin to write them; an earlier checkpoint is finished first.

        Raises:
            MachineError: On all ranks, if the folder or an earlier checkpoint cannot be written.
            UsageError: On all ranks, if the folder is another run's by now.
        """
        self.finish()
        rank, size = self.world.rank, self.world.size
        beside = self.folder / f".{PREFIX}{checkpoint.step:08d}.{size}-ranks"
        self.world.leading(self.shelf.require_held)
        self.world.leading(lambda: _make(beside))
        parts = {part: checkpoint.tensors[part] for part in ("model", "optimizer")}
        pieces = {part: own_pieces(tensors, rank, size) for part, tensors in parts.items()}
        files = {
            file_name(part, rank, size): {name: copied(parts[part][name]) for name in own}
            for part, own in pieces.items()
            if own
        }
        if self.world.leads:
            files["random"] = {name: copied(tensor) for name, tensor in checkpoint.tensors["random"].items()}
        self._pending = PendingCheckpoint(checkpoint, beside, pieces, self._thread.submit(_write, beside, files))

    def look(self) -> None:
        """Name the checkpoint under way once every rank has written its part."""
        if self._pending is not None and not self.world.largest(not self._pending.written.done()):
            self._commit()

    def finish(self) -> None:
        """Wait for the checkpoint under way, if there is one, and name it.

        Raises:
            MachineError: On all ranks, if one of them could not write its part.
        """
        if self._pending is not None:
            self.world.alive("writing a checkpoint")
            self._commit()

    def sweep(self) -> None:
        """Delete what killed processes left behind."""
        self.world.leading(self.shelf.sweep)

    def newest(self) -> Path | None:
        """What has the name of the newest checkpoint, as rank 0 sees it."""
        return self.world.gather(next(newest_first(self.folder), None))[0]

    def load_into(self, training: Training, path: Path) -> None:
        """Let a run go on from a checkpoint; ranks share the checking, and each reads its own part.

        Raises:
            CheckpointError: On all ranks, if it is damaged or not of such a run.
        """
        content = self.world.together(lambda: read_state(path))
        own = dict(sorted(content["checksums"].items())[self.world.rank :: self.world.size])
        self.world.together(lambda: check_files(path, own))
        like = dict(training.model.named_parameters())
        self.world.together(lambda: training.load(read_pieces(path, content, like)))

    def put_aside(self, path: Path, damage: CheckpointError) -> None:
        """Give a damaged checkpoint another name, under which it counts no more, and say so."""
        self.world.leading(lambda: self.shelf.put_aside(path, damage))

    def _commit(self) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        try:
            checksums = self.world.together(pending.written.result)
            gathered = self.world.gather((checksums, pending.pieces))
            self.world.leading(lambda: self._name(pending, gathered))
        except MachineError:
            if self.world.leads:
                shutil.rmtree(pending.beside, ignore_errors=True)
            raise

    def _name(
        self, pending: PendingCheckpoint, gathered: list[tuple[dict[str, str], dict[str, dict[str, Region]]]]
    ) -> None:
        """Write what all pieces have in common, and give the folder its name."""
        self.shelf.require_held()
        saved, final = pending.checkpoint, final_name(self.folder, pending.checkpoint.step)
        index = {
            part: merged(
                {name: tensor.shape for name, tensor in saved.tensors[part].items()}, [b[part] for _, b in gathered]
            )
            for part in pending.pieces
        }
        checksums = {name: checksum for found, _ in gathered for name, checksum in found.items()}
        for name in checksums:
            if not (pending.beside / f"{name}.safetensors").is_file():
                where = f"{pending.beside / name}.safetensors, which another rank has written, is not seen by rank 0"
                raise MachineError(f"{where}: put the run on a file system that all machines share")
        content = {"step": saved.step, "ranks": self.world.size, "checksums": checksums, "index": index}
        with reported(final, remedy_in(self.folder)):
            place(pending.beside, final, {**content, "state": saved.state})
        self.shelf.wrote(final)


def copied(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor on the host, which later updates do not change."""
    return local(tensor.detach()).to("cpu", copy=True).contiguous()


def _make(beside: Path) -> None:
    with reported(beside, remedy_in(beside.parent)):
        beside.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()


def _write(beside: Path, files: Files) -> dict[str, str]:
    checksums = {}
    for name, tensors in files.items():
        with reported(beside / f"{name}.safetensors", remedy_in(beside.parent)):
            checksums[name] = write_part(beside, name, tensors)
    return checksums
