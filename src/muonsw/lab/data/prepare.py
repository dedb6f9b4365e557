"""Documents to training and validation shards, in groups, so that memory is bounded and a killed run goes on.

A group is a stretch of consecutive documents; where it ends depends on their lengths alone. The record of finished
groups is written after each one, so a second run over the same documents only encodes what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from muonsw.lab.data.groups import Job, digest_of, grouped, is_validation
from muonsw.lab.data.record import RECORD, Group, Prepared, Split, open_split, read_record, save_record, shard_path
from muonsw.lab.data.shards import ShardError, open_shard
from muonsw.lab.data.stored import store_tokenizer
from muonsw.lab.data.tokenizers import Tokenizer
from muonsw.lab.data.workers import write_groups
from muonsw.lab.errors import UsageError
from muonsw.lab.storage import prepare_folder

__all__ = ["RECORD", "Group", "Prepared", "Split", "is_validation", "open_split", "prepare", "read_record"]

LOCK = ".lock"
_UNFINISHED = Group("", 0, tokens={}, checksums={})
# what writing beside and renaming leaves behind when a process is killed: a dot, a name, and the process
_LEFTOVER = re.compile(r"\..+\.(tokens|json|bpe)\.\d+")


def prepare(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    validation_fraction: float = 0.01,
    group_characters: int = 1 << 24,
    finished: Callable[[Group], None] = lambda _: None,
    processes: int = 1,
    threads: int = 1,
) -> Prepared:
    """Encode documents into the shards of a folder, each followed by an end of document.

    Args:
        documents: In a fixed order. At most one group of them for each process, and one more, is held in memory.
        tokenizer: What encodes them; it is stored in the folder.
        folder: Made if missing; what an earlier run with the same settings finished there is kept.
        validation_fraction: The share of documents, chosen by a hash of their text, that is never trained on.
        group_characters: A group ends with the document that reaches so many.
        finished: Called after every group, also after one that was already there, in the order in which they finish.
        processes: How many encode; with 1, this one does. The shards are the same for any number.
        threads: On how many threads this process encodes, when it does.

    Raises:
        UsageError: If there is no document, the folder holds data with other settings or is being prepared by another
            process, or something cannot be written.
    """
    settings = Prepared(tokenizer.identity, tokenizer.vocab_size, validation_fraction, group_characters)
    _check_settings(settings, processes, threads)
    with locked(folder):
        return fill(documents, tokenizer, folder, settings, finished=finished, processes=processes, threads=threads)


def _check_settings(settings: Prepared, processes: int, threads: int) -> None:
    fraction, characters = settings.validation_fraction, settings.group_characters
    if not 0.0 <= fraction < 1.0 or characters < 1:
        given = f"{fraction} and {characters}"
        raise ValueError(f"a validation fraction is in [0, 1) and a group has at least 1 character, not {given}")
    if processes < 1 or threads < 1:
        raise ValueError(f"preparing needs at least 1 process and 1 thread, not {processes} and {threads}")


@contextmanager
def locked(folder: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Make the folder and keep other processes from preparing it; what killed ones left half-written is removed.

    Args:
        folder: Made if missing.
        wait: How many seconds another process gets to finish.

    Raises:
        UsageError: If another process holds it, or it cannot be written.
    """
    prepare_folder(folder)
    lock = FileLock(folder / LOCK, timeout=wait)
    try:
        lock.acquire()
    except Timeout as error:
        fix = "wait for it to end, or choose another folder"
        raise UsageError(f"{folder} is being prepared by another process: {fix}") from error
    try:
        for path in folder.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                path.unlink(missing_ok=True)
        yield
    finally:
        lock.release()


def fill(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    folder: Path,
    settings: Prepared,
    *,
    finished: Callable[[Group], None],
    processes: int,
    threads: int,
) -> Prepared:
    """`prepare` inside a folder that is locked."""
    earlier = earlier_groups(folder, _settings(settings))
    settings = replace(settings, tokenizer_description=store_tokenizer(tokenizer, folder))
    if not earlier:
        save_record(folder, settings)
    done: dict[int, Group] = {}
    jobs = _jobs(documents, folder, settings, earlier)
    for number, group, is_new in write_groups(jobs, tokenizer, processes=processes, threads=threads):
        done[number] = group
        if is_new:
            save_record(folder, replace(settings, groups=_so_far(done, earlier)))
        finished(group)
    if not done:
        raise UsageError("the source gave no document: check its path")
    record = replace(settings, groups=tuple(done[number] for number in sorted(done)), complete=True)
    save_record(folder, record)
    return record


def _jobs(
    documents: Iterable[str], folder: Path, settings: Prepared, earlier: tuple[Group, ...]
) -> Iterator[Job | tuple[int, Group]]:
    for number, texts in enumerate(grouped(documents, settings.group_characters)):
        digest, size = digest_of(texts)
        kept = _kept_group(folder, number, digest, earlier, settings.tokenizer)
        yield (number, kept) if kept else Job(folder, number, texts, digest, size, settings.validation_fraction)


def _so_far(done: dict[int, Group], earlier: tuple[Group, ...]) -> tuple[Group, ...]:
    """What the record says meanwhile: groups that come later stay on it until the documents say otherwise."""
    before = dict(enumerate(earlier))
    return tuple(
        done.get(number) or before.get(number, _UNFINISHED) for number in range(max(max(done) + 1, len(earlier)))
    )


def earlier_groups(folder: Path, settings: dict[str, Any]) -> tuple[Group, ...]:
    """What a folder holds of these settings.

    Raises:
        UsageError: If it holds data with other settings.
    """
    if not (folder / RECORD).exists() or not (record := read_record(folder)).groups:
        return ()
    if different := ", ".join(_differences(_settings(record), settings)):
        raise UsageError(f"{folder} holds data with other settings: {different}; choose another folder or delete it")
    return record.groups


def _settings(record: Prepared) -> dict[str, Any]:
    names = ("tokenizer", "vocab_size", "validation_fraction", "group_characters")
    return {**{name: getattr(record, name) for name in names}, **(record.recipe or {})}


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    """Settings that both have and that differ; who prepares without a recipe answers for the documents."""
    for name, value in ours.items():
        if name in theirs and theirs[name] != value:
            yield f"{name} {theirs[name]} (now {value})"


def _kept_group(folder: Path, number: int, digest: str, earlier: tuple[Group, ...], tokenizer: str) -> Group | None:
    """The group on record, if it was made of the same texts and its shards are still the ones it made."""
    if number >= len(earlier) or earlier[number].digest != digest:
        return None
    try:
        for split, checksum in earlier[number].checksums.items():
            if open_shard(shard_path(folder, split, number), tokenizer=tokenizer).header.checksum != checksum:
                return None
    except ShardError:
        return None
    return earlier[number]
