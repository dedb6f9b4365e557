"""Token shards: files of token ids that are either whole and of the expected tokenizer, or refused by name.

A shard is a header of 128 bytes and the ids, both little-endian. Opening checks the header and the size on disk, which
costs nothing; `verify_shard` also reads every id. A shard is written beside its place and renamed, so that a file with
a shard's name was once complete.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

Tokens: TypeAlias = npt.NDArray[np.integer[Any]]

MAGIC = b"muonswTK"
VERSION = 1
HEADER_BYTES = 128
# magic, version, bytes in an id, count, vocabulary size, tokenizer, SHA-256 of the ids; then zeros, and a CRC-32
_FIELDS = struct.Struct("<8sIIQQ32s32s")
_CRC = struct.Struct("<I")
_VERIFY_IDS = 1 << 20
_MANY_FILES = "if it is one of very many, raise `ulimit -n` or prepare larger shards"
_PREPARE_AGAIN = "delete it and prepare the data again"


class ShardError(ValueError):
    """A shard that must not be used; the message names the file and says what to do."""


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says about its ids.

    Attributes:
        count: How many ids follow.
        vocab_size: Every id is below it.
        tokenizer: The `identity` of the tokenizer that made the ids, 64 hexadecimal digits.
        checksum: SHA-256 of the ids as stored, in hexadecimal.
    """

    count: int
    vocab_size: int
    tokenizer: str
    checksum: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest of uint16 and uint32 that holds the vocabulary."""
        return _dtype(self.vocab_size)

    @property
    def file_bytes(self) -> int:
        """The size of a whole shard file with this header."""
        return HEADER_BYTES + self.count * self.dtype.itemsize

    def pack(self) -> bytes:
        """The header as it is stored."""
        digests = bytes.fromhex(self.tokenizer), bytes.fromhex(self.checksum)
        fields = _FIELDS.pack(MAGIC, VERSION, self.dtype.itemsize, self.count, self.vocab_size, *digests)
        body = fields.ljust(HEADER_BYTES - _CRC.size, b"\0")
        return body + _CRC.pack(zlib.crc32(body))


@dataclass(frozen=True)
class Shard:
    """An open shard: its ids are mapped from the file, not held in memory."""

    path: Path
    header: ShardHeader
    tokens: Tokens


def write_shard(path: Path, tokens: Tokens | Iterable[Tokens], *, vocab_size: int, tokenizer: str) -> ShardHeader:
    """Write ids, given whole or in pieces, so that `path` holds all of them or is not touched.

    Args:
        path: The shard; its folder exists.
        tokens: A one-dimensional integer array, or an iterable of them, of which one at a time is held in memory.
        vocab_size: Every id must be below it.
        tokenizer: The tokenizer's `identity`.

    Returns:
        The header that was written.

    Raises:
        ShardError: If there is no id, or one outside the vocabulary; `path` is then left as it was.

    Examples:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = Path(folder.name, "train-00000.tokens")
        >>> write_shard(path, np.array([7, 1, 256]), vocab_size=257, tokenizer="ab" * 32).count
        3
        >>> open_shard(path, tokenizer="ab" * 32).tokens.tolist()
        [7, 1, 256]
        >>> open_shard(path, tokenizer="cd" * 32)
        Traceback (most recent call last):
        muonsw.lab.data.shards.ShardError: .../train-00000.tokens was made by another tokenizer (abab...
        >>> folder.cleanup()
    """
    dtype = _dtype(vocab_size)
    if len(tokenizer) != 64 or not set(tokenizer) <= set("0123456789abcdef"):
        raise ValueError(f"a tokenizer's identity is 64 lowercase hexadecimal digits, not {tokenizer!r}")
    checksum, count = hashlib.sha256(), 0
    with _renamed_when_whole(path) as file:
        file.write(bytes(HEADER_BYTES))
        for piece in [tokens] if isinstance(tokens, np.ndarray) else tokens:
            _check_ids(
                path, piece, vocab_size, first=count, fix="encode with the tokenizer that this vocabulary belongs to"
            )
            data = piece.astype(dtype).tobytes()
            checksum.update(data)
            file.write(data)
            count += piece.size
        if count == 0:
            raise ShardError(f"{path} would hold no token: give at least one document")
        header = ShardHeader(count, vocab_size, tokenizer, checksum.hexdigest())
        file.seek(0)
        file.write(header.pack())
    return header


def open_shard(path: Path, *, tokenizer: str | None = None) -> Shard:
    """Map a shard's ids after checking its header and its size on disk.

    Args:
        path: The shard.
        tokenizer: The identity that the shard must have; `None` takes any.

    Raises:
        ShardError: If the file is missing, empty, truncated, of another version or of another tokenizer.
    """
    with _opened(path) as file:
        header = _read_header(path, file, tokenizer)
        # the same open file is checked and mapped: a replacement in between cannot slip through and end in SIGBUS
        try:
            mapped = np.memmap(file, dtype=header.dtype, mode="r", offset=HEADER_BYTES, shape=(header.count,))
        except OSError as error:
            raise ShardError(f"{path} cannot be mapped ({error.strerror or error}): {_MANY_FILES}") from error
    return Shard(path, header, mapped)


def verify_shard(path: Path, *, tokenizer: str | None = None) -> ShardHeader:
    """Read the whole shard and check what `open_shard` checks, the checksum, and every id.

    It reads instead of mapping, so that a file that shrinks meanwhile is an error and not a dead process.

    Raises:
        ShardError: As `open_shard`, and if the ids were altered or one is outside the vocabulary.
    """
    checksum, first = hashlib.sha256(), 0
    with _opened(path) as file:
        header = _read_header(path, file, tokenizer)
        file.seek(HEADER_BYTES)
        while (ids := np.fromfile(file, dtype=header.dtype, count=_VERIFY_IDS)).size:
            checksum.update(ids.tobytes())
            _check_ids(path, ids, header.vocab_size, first=first, fix=_PREPARE_AGAIN)
            first += ids.size
    if checksum.hexdigest() != header.checksum:
        raise ShardError(f"{path} was altered after it was written (its checksum differs): {_PREPARE_AGAIN}")
    return header


def _dtype(vocab_size: int) -> np.dtype[Any]:
    if not 1 <= vocab_size <= 1 << 32:
        raise ValueError(f"a vocabulary has 1 to 2**32 tokens, not {vocab_size}")
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def _check_ids(path: Path, ids: Tokens, vocab_size: int, *, first: int, fix: str) -> None:
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"tokens are one-dimensional integer arrays, not {ids.dtype} of shape {ids.shape}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        where = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])
        outside = f"token {int(ids[where])} at position {first + where}"
        raise ShardError(f"{path}: {outside} is outside the vocabulary of {vocab_size}: {fix}")


def _read_header(path: Path, file: BinaryIO, tokenizer: str | None) -> ShardHeader:
    size, raw = os.fstat(file.fileno()).st_size, file.read(HEADER_BYTES)
    if size == 0:
        raise ShardError(f"{path} is empty: {_PREPARE_AGAIN}")
    if not raw.startswith(MAGIC[: len(raw)]):
        raise ShardError(f"{path} is not a token shard: give files that `muonsw data prepare` wrote")
    if len(raw) < HEADER_BYTES:
        raise ShardError(f"{path} is truncated inside its header ({size} bytes): {_PREPARE_AGAIN}")
    header = _parse_header(path, raw)
    if size != header.file_bytes:
        problem = "is truncated" if size < header.file_bytes else "has bytes after its end"
        raise ShardError(f"{path} {problem} ({size} bytes, not {header.file_bytes}): {_PREPARE_AGAIN}")
    if tokenizer is not None and header.tokenizer != tokenizer:
        ours, theirs = tokenizer[:12], header.tokenizer[:12]
        fix = "use that tokenizer, or prepare the data again with this one"
        raise ShardError(f"{path} was made by another tokenizer ({theirs}..., not {ours}...): {fix}")
    return header


def _parse_header(path: Path, raw: bytes) -> ShardHeader:
    _, version, itemsize, count, vocab_size, tokenizer, checksum = _FIELDS.unpack_from(raw)
    if version != VERSION:
        fix = "prepare the data again, or use the muonsw that wrote it"
        raise ShardError(f"{path} is of shard version {version}, and this muonsw reads version {VERSION}: {fix}")
    body, (crc,) = raw[: -_CRC.size], _CRC.unpack_from(raw, HEADER_BYTES - _CRC.size)
    if zlib.crc32(body) != crc or not 1 <= vocab_size <= 1 << 32 or itemsize != _dtype(vocab_size).itemsize:
        raise ShardError(f"{path} has an altered header: {_PREPARE_AGAIN}")
    if count == 0:
        raise ShardError(f"{path} holds no token: {_PREPARE_AGAIN}")
    return ShardHeader(count, vocab_size, tokenizer.hex(), checksum.hex())


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        file = path.open("rb")
    except OSError as error:
        reason = error.strerror or error
        raise ShardError(f"{path} cannot be read ({reason}): check the path, or prepare the data") from error
    with file:
        yield file


@contextmanager
def _renamed_when_whole(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its name, on disk before that, when the block ends without an error."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
