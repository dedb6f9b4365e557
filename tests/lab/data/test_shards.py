"""A shard is what is on record, or it is refused by name; and so is the record."""

import json
import os

import numpy as np
import pytest

from muonsw.lab.data import loader as module
from muonsw.lab.data.loader import (
    RECORD,
    DataRecord,
    Group,
    fingerprint,
    load_tokenizer,
    open_shard,
    open_split,
    read_record,
    save_record,
    shard_path,
    verify_folder,
)
from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.tokenizer import BPE_FILE, BPETokenizer, ByteTokenizer
from muonsw.lab.errors import UsageError


@pytest.fixture
def folder(tmp_path):
    """A prepared folder with one shard for each split."""
    texts = [f"document {number}" for number in range(100)]
    prepare(texts, ByteTokenizer(), tmp_path / "data", validation_fraction=0.3)
    return tmp_path / "data"


def shard_of(folder, split="train"):
    (path,) = read_record(folder).paths(folder, split)
    return path


def change_record(folder, change):
    fields = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    change(fields)
    (folder / RECORD).write_text(json.dumps(fields), encoding="utf-8")


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(1 << 16, np.uint16), ((1 << 16) + 1, np.uint32), (1 << 32, np.uint32)]
)
def test_tokens_take_the_smaller_of_two_types(tmp_path, vocab_size, dtype):
    ids = np.array([0, 1, vocab_size - 1], dtype=dtype)
    group = Group("0123456789", 1, {"train": 3}, {"train": ""})
    path = shard_path(tmp_path, "train", 0, group)
    path.write_bytes(ids.tobytes())
    shard = open_shard(path, group, "train", DataRecord("ab", vocab_size, 0.1, 1000), check=False)
    assert isinstance(shard.tokens, np.memmap)
    assert shard.tokens.dtype == dtype
    assert shard.tokens.tolist() == ids.tolist()
    with pytest.raises(ValueError, match="read-only"):
        shard.tokens[0] = 1


def test_a_record_is_read_as_it_was_written(tmp_path):
    group = Group("0123", 3, {"train": 5, "validation": 1}, {"train": "a", "validation": "b"}, bytes=20)
    record = DataRecord("ab", 257, 0.1, 1000, (group,), complete=True, recipe={"corpus": {"limit": None}})
    save_record(tmp_path, record)
    assert read_record(tmp_path) == record


def test_the_fingerprint_is_pinned(folder):
    """Records of runs name it."""
    assert fingerprint(read_record(folder)) == "00db7589e83501d5"


def test_a_large_split_is_opened_without_reading_it_and_verified_by_byte(folder, monkeypatch):
    path = shard_of(folder)
    path.write_bytes(b"\0" + path.read_bytes()[1:])
    monkeypatch.setattr(module, "CHECKED_BYTES", 0)
    assert len(open_split(folder, "train")) == 1
    (problem,) = verify_folder(folder)
    assert f"{path.name} was altered" in problem


def test_verify_names_every_problem(folder):
    assert list(verify_folder(folder)) == []
    change_record(folder, lambda fields: fields.update(complete=False, vocab_size=200))
    os.truncate(shard_of(folder), 10)
    shard_of(folder, "validation").unlink()
    problems = list(verify_folder(folder))
    expected = ("not prepared to the end", "is not the one that made its tokens", "has 10 bytes", "cannot be read")
    assert len(problems) == len(expected)
    assert all(words in problem for words, problem in zip(expected, problems, strict=True))


def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(tmp_path):
    texts = ["the quick brown fox jumps over the lazy dog. " * 20]
    prepare(texts, BPETokenizer.train(texts, 300), tmp_path, validation_fraction=0.0)
    assert load_tokenizer(tmp_path).identity == read_record(tmp_path).tokenizer
    BPETokenizer.train(texts, 280).save(tmp_path)
    with pytest.raises(UsageError, match="is not the one that made its tokens"):
        load_tokenizer(tmp_path)
    (tmp_path / BPE_FILE).unlink()
    with pytest.raises(UsageError, match=rf"{BPE_FILE} cannot be read: No such file or directory; put the right"):
        load_tokenizer(tmp_path)
    change_record(tmp_path, lambda fields: fields.update(tokenizer_description=None))
    with pytest.raises(UsageError, match="does not say which tokenizer made it"):
        load_tokenizer(tmp_path)


def test_a_folder_without_usable_data_is_named(folder, tmp_path):
    with pytest.raises(UsageError, match="holds no prepared data"):
        open_split(tmp_path, "train")
    prepare(["one"], ByteTokenizer(), tmp_path / "one", validation_fraction=0.0)
    with pytest.raises(UsageError, match="has no validation tokens"):
        open_split(tmp_path / "one", "validation")
    change_record(folder, lambda fields: fields.update(complete=False))
    with pytest.raises(UsageError, match="not prepared to the end"):
        open_split(folder, "train")
    change_record(folder, lambda fields: fields.pop("format"))
    with pytest.raises(UsageError, match=r"data\.json is of format 1, and .* reads format 2: delete the folder"):
        open_split(folder, "train")


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.update(vocab_size="257"),
        lambda fields: fields.update(groups=3),
        lambda fields: fields.update(extra=1),
        lambda fields: fields.pop("tokenizer"),
        lambda fields: fields["groups"][0].update(tokens={"train": 5}),
        lambda fields: fields["groups"][0].update(checksums={"elsewhere": "a"}),
    ],
)
def test_a_damaged_record_is_refused(folder, change):
    change_record(folder, change)
    with pytest.raises(UsageError, match=r"data\.json cannot be read .*: delete the folder and prepare the data again"):
        open_split(folder, "train")
