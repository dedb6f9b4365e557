"""A shard is what is on record, or it is refused by name; and so is the record."""

import json
import os
import signal
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw.lab.base.errors import UsageError
from muonsw.lab.data import shards as module
from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.shards import (
    RECORD,
    Group,
    ShardError,
    check_tokens,
    open_shard,
    open_split,
    read_record,
    save_record,
    verify_folder,
    write_shard,
)
from muonsw.lab.data.tokenizers import ByteTokenizer
from tests.faults.killing import in_child
from tests.lab.data.small_shards import DIGEST, damage, make_shards, record_of

IDS = np.arange(1000) % 257


@pytest.fixture
def folder(tmp_path):
    """A prepared folder with one shard for each split."""
    texts = [f"document {number}" for number in range(100)]
    prepare(texts, ByteTokenizer(), tmp_path / "data", validation_fraction=0.3)
    return tmp_path / "data"


def shard_of(folder, split="train"):
    (path,) = read_record(folder).paths(folder, split)
    return path


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32), (1 << 32, np.uint32)]
)
def test_what_is_written_is_what_is_read(tmp_path, vocab_size, dtype):
    ids, record = np.array([0, 1, vocab_size - 1]), record_of(vocab_size)
    count, checksum = write_shard(tmp_path / "a", [ids[:1], ids[1:]], record)
    shard = open_shard(tmp_path / "a", Group(DIGEST, 1, {"train": count}, {"train": checksum}), "train", record)
    assert shard.tokens.dtype == dtype
    assert shard.tokens.tolist() == ids.tolist()
    assert isinstance(shard.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        shard.tokens[0] = 1


@settings(max_examples=20, deadline=None)
@given(cuts=st.lists(st.integers(0, len(IDS)), max_size=5))
def test_pieces_give_the_same_file_as_the_whole(tmp_path_factory, cuts):
    folder = tmp_path_factory.mktemp("pieces")
    whole = write_shard(folder / "whole", [IDS], record_of(257))
    assert write_shard(folder / "pieces", np.split(IDS.astype(np.int32), sorted(cuts)), record_of(257)) == whole
    assert (folder / "whole").read_bytes() == (folder / "pieces").read_bytes() == IDS.astype("<u2").tobytes()


@pytest.mark.parametrize("bad", [257, -1, 70_000])
def test_a_token_outside_the_vocabulary_is_refused_while_writing(tmp_path, bad):
    path = tmp_path / "a"
    write_shard(path, [IDS], record_of(257))
    before = path.read_bytes()
    with pytest.raises(ShardError, match=f"a: token {bad} is outside the vocabulary of 257"):
        write_shard(path, [IDS, np.array([1, 2, bad])], record_of(257))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_token_outside_the_vocabulary_is_named_with_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_READ_BYTES", 7)
    (shard,) = make_shards(tmp_path, 300)
    check_tokens(shard)
    with pytest.raises(ShardError, match=rf"{shard.path.name}: token 250 at position 250 is outside .* of 250"):
        check_tokens(shard._replace(vocab_size=250))


@pytest.mark.parametrize("cut", [0, 1, -1, 2])
def test_a_shard_of_another_size_is_refused(folder, cut):
    path = shard_of(folder)
    data = path.read_bytes()
    path.write_bytes(data[:cut] if cut <= 0 else data + b"\0" * cut)
    with pytest.raises(ShardError, match=rf"{path.name} has \d+ bytes, not {len(data)} as on record: delete it"):
        open_split(folder, "train")


def test_a_missing_shard_and_a_folder_in_its_place_are_refused(folder):
    path = shard_of(folder)
    path.unlink()
    with pytest.raises(ShardError, match=rf"{path.name} cannot be read \(No such file"):
        open_split(folder, "train")
    path.mkdir()
    with pytest.raises(ShardError, match=rf"{path.name} cannot be read \(Is a directory"):
        open_split(folder, "train")


def test_an_altered_byte_is_found_at_once_in_small_splits_and_by_verify_in_all(folder, monkeypatch):
    path = shard_of(folder)
    damage(path)
    with pytest.raises(ShardError, match=rf"{path.name} was altered"):
        open_split(folder, "train")
    monkeypatch.setattr(module, "CHECKED_BYTES", 0)
    assert len(open_split(folder, "train")) == 1
    (bad,) = [checked for checked in verify_folder(folder) if checked.problem]
    assert bad.path == path
    assert "was altered" in bad.problem


def test_verify_finds_a_token_that_the_vocabulary_on_record_does_not_have(folder):
    record = read_record(folder)
    fields = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    (folder / RECORD).write_text(json.dumps({**fields, "vocab_size": 200}), encoding="utf-8")
    problems = [checked.problem for checked in verify_folder(folder) if checked.problem]
    assert "is not the one that made its tokens" in problems[0]
    assert f"token {record.vocab_size - 1} at position" in problems[1]


def test_a_shorter_file_put_in_a_shards_place_leaves_what_is_open(folder):
    (opened,), path = open_split(folder, "train"), shard_of(folder)
    before, shorter = opened.tokens.tolist(), folder / "shorter"
    shorter.write_bytes(path.read_bytes()[:100])
    shorter.replace(path)
    assert opened.tokens.tolist() == before, "what was open stays the old file"


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.parametrize("moment", ["while writing", "before the rename"])
def test_a_kill_leaves_no_shard_and_does_not_disturb_the_next_writer(tmp_path, moment):
    path = tmp_path / "train-00000-01234567.tokens"

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def pieces():
        yield IDS
        if moment == "while writing":
            die()

    def doomed():
        type(path).replace = die
        write_shard(path, pieces(), record_of(257))
        return 0

    assert in_child(doomed) == -signal.SIGKILL
    assert not path.exists()
    assert list(path.parent.glob("*.tokens")) == [], "what is left behind does not look like a shard"
    assert write_shard(path, [IDS], record_of(257))[0] == len(IDS)


def test_the_data_is_on_disk_before_the_name_is(tmp_path, monkeypatch):
    order, path = [], tmp_path / "a"
    sync, rename = os.fsync, type(path).replace
    monkeypatch.setattr(os, "fsync", lambda file: (order.append("fsync"), sync(file)))
    monkeypatch.setattr(type(path), "replace", lambda *args: (order.append("rename"), rename(*args)))
    write_shard(path, [IDS], record_of(257))
    assert order == ["fsync", "rename", "fsync"], "the file, its name, the folder"


def test_a_record_is_read_as_it_was_written(tmp_path):
    group = Group(DIGEST, 3, {"train": 5, "validation": 1}, {"train": "a", "validation": "b"}, bytes=20)
    record = record_of(groups=(group,), complete=True, recipe={"corpus": {"limit": None}})
    save_record(tmp_path, record)
    assert read_record(tmp_path) == record


def test_a_folder_of_an_earlier_format_is_refused_with_the_remedy(folder):
    fields = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    del fields["format"]
    (folder / RECORD).write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(UsageError, match=r"data\.json is of format 1, and .* reads format 2: delete the folder"):
        open_split(folder, "train")


def changed(folder, change):
    fields = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    change(fields)
    (folder / RECORD).write_text(json.dumps(fields), encoding="utf-8")


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.update(vocab_size=0),
        lambda fields: fields.update(vocab_size="257"),
        lambda fields: fields.update(vocab_size=True),
        lambda fields: fields.update(groups=3),
        lambda fields: fields.update(groups=[3]),
        lambda fields: fields.update(extra=1),
        lambda fields: fields.pop("tokenizer"),
        lambda fields: fields["groups"][0].update(tokens={"train": 5}),
        lambda fields: fields["groups"][0].update(tokens={"train": -1, "validation": 1}),
        lambda fields: fields["groups"][0].update(checksums={"elsewhere": "a"}),
        lambda fields: fields["groups"][0].update(digest="../../x"),
    ],
)
def test_a_record_that_says_nonsense_is_refused(folder, change):
    changed(folder, change)
    with pytest.raises(UsageError, match=r"data\.json cannot be read .*: delete the folder and prepare the data again"):
        open_split(folder, "train")


@settings(max_examples=60, deadline=None)
@given(
    content=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["format", "groups", "tokenizer", "vocab_size", "complete", "digest", "tokens"]), inner
            )
        ),
    ).map(lambda data: json.dumps(data).encode())
)
def test_whatever_a_record_holds_it_is_read_or_refused(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("record")
    (folder / RECORD).write_bytes(content)
    with pytest.raises(UsageError):
        read_record(folder)
