"""Reading a prepared folder to the last byte, and saying everything that is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from muonsw.lab.data.record import SPLITS, check_on_record, read_record
from muonsw.lab.data.shards import ShardError, verify_shard
from muonsw.lab.data.stored import load_tokenizer
from muonsw.lab.errors import UsageError


class Checked(NamedTuple):
    """A file that was read to the end.

    Attributes:
        path: The file, or the folder for what concerns all of it.
        problem: What is wrong, or `None`.
        tokens: How many it holds.
    """

    path: Path
    problem: str | None
    tokens: int = 0


def verify_folder(folder: Path) -> Iterator[Checked]:
    """Check the record, the tokenizer, and every token of every shard, one after the other.

    Raises:
        UsageError: If the folder has no readable record.
    """
    record = read_record(folder)
    if not record.complete:
        yield Checked(folder, f"{folder} is not prepared to the end: run the same `muonsw data prepare` again")
    try:
        load_tokenizer(folder)
    except UsageError as error:
        yield Checked(folder, str(error))
    for split in SPLITS:
        for path, checksum in zip(record.paths(folder, split), record.checksums(split), strict=True):
            yield _checked(path, record.tokenizer, checksum)


def _checked(path: Path, tokenizer: str, checksum: str) -> Checked:
    try:
        header = verify_shard(path, tokenizer=tokenizer)
        check_on_record(path, header.checksum, checksum)
    except (ShardError, OSError) as error:
        return Checked(path, str(error))
    return Checked(path, None, header.count)
