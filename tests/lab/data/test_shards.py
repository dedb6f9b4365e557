"""A shard is whole, unaltered and of the expected tokenizer, or it is refused by name."""

import os
import signal
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw.lab.data import shards as module
from muonsw.lab.data.shards import HEADER_BYTES, MAGIC, ShardError, ShardHeader, open_shard, verify_shard, write_shard

from .small import FOREIGN, TOKENIZER

IDS = np.arange(1000) % 257


@pytest.fixture
def path(tmp_path):
    return tmp_path / "train-00000.tokens"


@pytest.fixture
def shard(path):
    write_shard(path, IDS, vocab_size=257, tokenizer=TOKENIZER)
    return path


def assert_refused(path, match, *, only_by_verify=False):
    for check in [verify_shard] if only_by_verify else [verify_shard, open_shard]:
        with pytest.raises(ShardError, match=match) as caught:
            check(path, tokenizer=TOKENIZER)
        assert str(path) in str(caught.value)
        assert "prepare" in str(caught.value), "the message says what to do"


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32), (1 << 32, np.uint32)]
)
def test_what_is_written_is_what_is_read(path, vocab_size, dtype):
    ids = np.array([0, 1, vocab_size - 1])
    written = write_shard(path, ids, vocab_size=vocab_size, tokenizer=TOKENIZER)
    shard = open_shard(path, tokenizer=TOKENIZER)
    assert shard.header == written == verify_shard(path)
    assert shard.tokens.dtype == dtype
    assert shard.tokens.tolist() == ids.tolist()
    assert isinstance(shard.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        shard.tokens[0] = 1


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, len(IDS)), max_size=5))
def test_pieces_give_the_same_file_as_the_whole(tmp_path_factory, cuts):
    folder = tmp_path_factory.mktemp("pieces")
    whole, pieces = folder / "whole", folder / "pieces"
    write_shard(whole, IDS, vocab_size=257, tokenizer=TOKENIZER)
    write_shard(pieces, iter(np.split(IDS.astype(np.int32), sorted(cuts))), vocab_size=257, tokenizer=TOKENIZER)
    assert whole.read_bytes() == pieces.read_bytes()


def test_every_truncation_is_refused(shard):
    data = shard.read_bytes()
    for size in [1, len(MAGIC) - 1, len(MAGIC), 12, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, len(data) - 1]:
        shard.write_bytes(data[:size])
        assert_refused(shard, "is truncated")


def test_more_bytes_than_announced_are_refused(shard):
    shard.write_bytes(shard.read_bytes() + b"\0\0")
    assert_refused(shard, "has bytes after its end")


def test_an_empty_file_a_missing_file_and_a_folder_are_refused(path):
    assert_refused(path, "cannot be read")
    path.touch()
    assert_refused(path, "is empty")
    assert_refused(path.parent, "cannot be read")


def test_a_file_of_another_kind_is_refused(path):
    path.write_bytes(b"PK\3\4" + bytes(200))
    assert_refused(path, "is not a token shard")


def test_every_flipped_byte_of_the_header_is_refused_at_open(shard):
    data = shard.read_bytes()
    for place in range(HEADER_BYTES):
        shard.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert_refused(shard, r"not a token shard|version|altered header|truncated|after its end|another tokenizer")


@pytest.mark.parametrize("place", [HEADER_BYTES, HEADER_BYTES + 999, -2])
def test_a_flipped_byte_of_the_ids_is_refused_by_verify(shard, place):
    data = bytearray(shard.read_bytes())
    data[place] ^= 2
    shard.write_bytes(data)
    assert_refused(shard, "was altered|outside the vocabulary", only_by_verify=True)


def test_a_shard_of_another_tokenizer_is_refused(path):
    write_shard(path, IDS, vocab_size=257, tokenizer=FOREIGN)
    assert_refused(path, f"another tokenizer .{FOREIGN[:12]}..., not {TOKENIZER[:12]}")
    assert open_shard(path).header.tokenizer == FOREIGN


def with_fields(path, **changes):
    """Rewrite header fields with a valid CRC, as another program or version would."""
    places = {"version": ("<I", 8), "count": ("<Q", 16)}
    data = bytearray(path.read_bytes())
    for name, value in changes.items():
        struct.pack_into(places[name][0], data, places[name][1], value)
    struct.pack_into("<I", data, HEADER_BYTES - 4, zlib.crc32(data[: HEADER_BYTES - 4]))
    path.write_bytes(data)


def test_a_shard_of_another_version_is_refused(shard):
    with_fields(shard, version=2)
    assert_refused(shard, "of shard version 2, and this muonsw reads version 1")


def test_a_shard_without_tokens_is_refused(shard, path):
    with_fields(shard, count=0)
    assert_refused(shard, "holds no token")
    path.unlink()
    for nothing in [np.array([], dtype=np.int64), iter([])]:
        with pytest.raises(ShardError, match="would hold no token"):
            write_shard(path, nothing, vocab_size=257, tokenizer=TOKENIZER)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("bad", [257, -1, 70_000])
def test_a_token_outside_the_vocabulary_is_refused_while_writing(shard, bad):
    before = shard.read_bytes()
    with pytest.raises(ShardError, match=f"token {bad} at position 1002 is outside the vocabulary of 257") as caught:
        write_shard(shard, [IDS, np.array([1, 2, bad])], vocab_size=257, tokenizer=TOKENIZER)
    assert str(shard) in str(caught.value)
    assert shard.read_bytes() == before
    assert list(shard.parent.iterdir()) == [shard]


def test_a_token_outside_the_vocabulary_is_refused_by_verify_even_with_a_right_checksum(shard, monkeypatch):
    monkeypatch.setattr(module, "_check_ids", lambda *_, **__: None)
    write_shard(shard, np.array([0, 300]), vocab_size=257, tokenizer=TOKENIZER)
    monkeypatch.undo()
    assert_refused(shard, "token 300 at position 1 is outside the vocabulary of 257", only_by_verify=True)


def test_verify_reads_in_pieces(shard, monkeypatch):
    monkeypatch.setattr(module, "_VERIFY_IDS", 7)
    assert verify_shard(shard).count == len(IDS)
    data = bytearray(shard.read_bytes())
    data[-1] = 255
    shard.write_bytes(data)
    assert_refused(shard, f"token {0xFF00 + IDS[-1]} at position 999", only_by_verify=True)


def test_a_shorter_file_put_in_a_shards_place_is_noticed_at_open(shard):
    opened = open_shard(shard)
    shorter = shard.with_name("shorter")
    shorter.write_bytes(shard.read_bytes()[: HEADER_BYTES + 100])
    shorter.replace(shard)
    assert_refused(shard, "is truncated")
    assert opened.tokens.tolist() == IDS.tolist(), "what was open stays the old file"


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from muonsw.lab.data.shards import write_shard

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def pieces():
    yield np.arange(100)
    if sys.argv[2] == "while writing":
        die()

if sys.argv[2] == "before the rename":
    Path.replace = die
write_shard(Path(sys.argv[1]), pieces(), vocab_size=257, tokenizer="0" * 64)
"""


@pytest.mark.parametrize("moment", ["while writing", "before the rename"])
def test_a_kill_leaves_no_shard_and_does_not_disturb_the_next_writer(path, moment):
    result = subprocess.run([sys.executable, "-c", KILLED, str(path), moment], check=False, timeout=60)
    assert result.returncode == -signal.SIGKILL
    assert not path.exists()
    assert list(path.parent.glob("*.tokens")) == [], "what is left behind does not look like a shard"
    write_shard(path, IDS, vocab_size=257, tokenizer=TOKENIZER)
    assert verify_shard(path).count == len(IDS)


def test_the_data_is_on_disk_before_the_name_is(path, monkeypatch):
    order = []
    sync, rename = os.fsync, type(path).replace
    monkeypatch.setattr(os, "fsync", lambda file: (order.append("fsync"), sync(file)))
    monkeypatch.setattr(type(path), "replace", lambda *args: (order.append("rename"), rename(*args)))
    write_shard(path, IDS, vocab_size=257, tokenizer=TOKENIZER)
    assert order == ["fsync", "rename", "fsync"], "the file, its name, the folder"


def test_arguments_that_no_shard_can_hold_are_refused(path):
    with pytest.raises(ValueError, match="64 lowercase hexadecimal digits"):
        write_shard(path, IDS, vocab_size=257, tokenizer="gpt2")
    with pytest.raises(ValueError, match="1 to 2"):
        write_shard(path, IDS, vocab_size=0, tokenizer=TOKENIZER)
    for bad in [np.zeros(3), np.zeros((2, 2), dtype=np.int64)]:
        with pytest.raises(TypeError, match="one-dimensional integer"):
            write_shard(path, bad, vocab_size=257, tokenizer=TOKENIZER)
    assert list(path.parent.iterdir()) == []


def test_the_header_has_its_documented_size():
    assert len(ShardHeader(1, 257, TOKENIZER, TOKENIZER).pack()) == HEADER_BYTES
