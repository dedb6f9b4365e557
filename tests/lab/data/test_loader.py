"""The batch of a step is a pure function of seed and step, and shards match their record."""

import hashlib
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw.lab.data import loader as module
from muonsw.lab.data.loader import (
    RECORD,
    DataRecord,
    Group,
    TokenLoader,
    ValidationLoader,
    Windows,
    fingerprint,
    load_tokenizer,
    open_split,
    read_record,
    save_record,
    shuffled,
    verify_folder,
)
from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.tokenizer import BPE_FILE, BPETokenizer, ByteTokenizer
from muonsw.lab.errors import UsageError


@pytest.fixture(scope="module")
def shards():
    """Tokens count upwards through the shards, so that every token shows its position."""
    ends = np.cumsum([100, 3, 41, 9, 250])
    return [np.arange(first, last) for first, last in zip(ends - np.diff(ends, prepend=0), ends, strict=True)]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def joined(batches):
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def starts(loader, steps):
    """The first token of every window that the steps read, which identifies the window."""
    return torch.cat([loader.batch_at(step)[0][:, 0] for step in steps]).tolist()


@pytest.mark.parametrize("sequence", [1, 40])
def test_windows_stay_inside_their_shard_and_targets_follow_inputs(shards, sequence):
    windows = Windows(shards, sequence)
    inputs, targets = windows.gather(np.arange(windows.count))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (windows.count, sequence)
    assert torch.equal(targets, inputs + 1), "tokens are numbered, so a target is its input plus one"
    ends = np.cumsum([len(shard) for shard in shards])
    first, last = (np.searchsorted(ends, tokens.numpy(), side="right") for tokens in (inputs[:, 0], targets[:, -1]))
    assert np.array_equal(first, last), "no window crosses a shard's end"
    assert len(targets.unique()) == targets.numel(), "no token is a target twice"
    covered = [(len(shard) - 1) // sequence * sequence + 1 for shard in shards if len(shard) > sequence]
    assert len(torch.cat([inputs, targets]).unique()) == sum(covered), "all but less than a window at a shard's end"


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 48), seed=st.integers(0, 2**64), epochs=st.integers(1, 3))
def test_each_epoch_visits_each_window_exactly_once(shards, batch, seed, epochs):
    loader = TokenLoader(shards, 8, batch, seed)
    size = loader.windows.count
    seen = starts(loader, range(-(-epochs * size // batch)))
    every = set(loader.windows.gather(np.arange(size))[0][:, 0].tolist())
    orders = [seen[epoch * size : (epoch + 1) * size] for epoch in range(epochs)]
    assert all(len(order) == size and set(order) == every for order in orders)
    assert len({tuple(order) for order in orders}) == epochs, "another order in every epoch"


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 12), (12, 1), (2, 3), (6, 4)])
def test_any_split_reassembles_to_the_batch(shards, ranks, accumulation):
    loader = TokenLoader(shards, 2, 144, 7)
    for step in (0, 5):
        per_rank = [
            list(loader.micro_batches(step, ranks=ranks, rank=r, accumulation=accumulation)) for r in range(ranks)
        ]
        assert all(len(micro) == accumulation for micro in per_rank)
        in_order = [per_rank[rank][micro] for micro in range(accumulation) for rank in range(ranks)]
        assert same(joined(in_order), loader.batch_at(step))


def test_validation_reads_the_same_windows_whatever_the_batch_and_the_ranks(shards):
    every = joined(batch for batch, _ in ValidationLoader(shards, 8, 1000).parts())
    assert len(every[0]) == Windows(shards, 8).count
    for batch in (1, 7, 16):
        loader = ValidationLoader(shards, 8, batch)
        assert same(joined(batch for batch, _ in loader.parts()), every)
        per_rank = [list(loader.parts(ranks=3, rank=rank)) for rank in range(3)]
        assert len({len(parts) for parts in per_rank}) == 1, "every rank has as many batches"
        in_turn = [part for parts in zip(*per_rank, strict=True) for part in parts]
        assert same(joined(tuple(rows[:count] for rows in part) for part, count in in_turn), every)


@pytest.mark.parametrize("windows", [5, 10_000])
def test_validation_windows_are_different_and_spread(shards, windows):
    loader = ValidationLoader(shards, 8, 4, windows)
    assert len(loader.ids) == min(windows, loader.windows.count) == len(np.unique(loader.ids))
    gaps = np.diff([*loader.ids, loader.windows.count])
    assert gaps.max() - gaps.min() <= 1


def test_a_corpus_that_is_too_short_is_refused(shards):
    with pytest.raises(ValueError, match="no shard holds one window of 251 tokens"):
        TokenLoader(shards, 250, 1, 0)
    with pytest.raises(ValueError, match="fewer than one batch of 2"):
        TokenLoader(shards, 249, 2, 0)


def test_the_order_of_the_data_never_changes(tmp_path):
    """Seed and step alone decide the batches, on every machine and in every version."""
    documents = [f"document {number} " * (number % 17 + 1) for number in range(200)]
    prepare(documents, ByteTokenizer(), tmp_path, validation_fraction=0.2, group_characters=3000)
    training = TokenLoader(open_split(tmp_path, "train"), sequence=16, batch=6, seed=7)
    held_out = ValidationLoader(open_split(tmp_path, "validation"), sequence=16, batch=4, windows=30)
    digest = hashlib.sha256()
    for batch in [*(training.batch_at(step) for step in (0, 1, 2, 1000, 10**9)), *(b for b, _ in held_out.parts())]:
        for part in batch:
            digest.update(part.numpy().astype("<i8").tobytes())
    assert digest.hexdigest() == "157acfaf39fe33ee16b46ec5dee4ea43e7ea0c4c3fc3f7de809ab768d9272d79"


# ---- The shuffle


def reference(index, size, key):
    """The network in plain integers, one index at a time."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=64).digest()
    keys = [int.from_bytes(digest[8 * r : 8 * r + 8], "little") for r in range(8)]
    half = next(h for h in range(32) if 4**h >= size)
    while True:
        left, right = divmod(index, 2**half)
        for round_key in keys:
            word = right ^ round_key
            word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ ((word ^ (word >> 31)) % 2**half)
        index = left * 2**half + right
        if index < size:
            return index


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 1 << 62), key=st.tuples(st.integers(0, 2**70), st.integers(0, 1000)), data=st.data())
def test_the_shuffle_equals_the_plain_reference_and_permutes(size, key, data):
    indices = data.draw(st.lists(st.integers(0, size - 1), max_size=5, unique=True))
    images = shuffled(np.array(indices, dtype=np.int64), size, key)
    assert images.tolist() == [reference(index, size, key) for index in indices]
    small = size % 5000 + 1
    assert np.array_equal(np.sort(shuffled(np.arange(small), small, key)), np.arange(small))


# ---- Records and shards


@pytest.fixture
def folder(tmp_path):
    """A prepared folder with one shard for each split."""
    texts = [f"document {number}" for number in range(100)]
    prepare(texts, ByteTokenizer(), tmp_path / "data", validation_fraction=0.3)
    return tmp_path / "data"


def change_record(folder, change):
    fields = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    change(fields)
    (folder / RECORD).write_text(json.dumps(fields), encoding="utf-8")


def test_a_record_is_read_as_it_was_written_and_its_fingerprint_is_pinned(folder, tmp_path):
    """Records of runs name the fingerprint."""
    group = Group("0123", 3, {"train": 5, "validation": 1}, {"train": "a", "validation": "b"}, bytes=20)
    record = DataRecord("ab", 257, 0.1, 1000, (group,), complete=True, recipe={"corpus": {"limit": None}})
    save_record(tmp_path, record)
    assert read_record(tmp_path) == record
    assert fingerprint(read_record(folder)) == "00db7589e83501d5"


def test_a_large_split_is_opened_without_reading_it_and_verified_by_byte(folder, monkeypatch):
    (path,) = read_record(folder).shards(folder, "train")
    path.write_bytes(b"\0" + path.read_bytes()[1:])
    monkeypatch.setattr(module, "CHECKED_BYTES", 0)
    assert len(open_split(folder, "train")) == 1
    (problem,) = verify_folder(folder)
    assert f"{path.name} was altered" in problem


def test_a_tokenizer_that_did_not_make_the_tokens_is_refused(tmp_path):
    texts = ["the quick brown fox jumps over the lazy dog. " * 20]
    prepare(texts, BPETokenizer.train(texts, 300), tmp_path, validation_fraction=0.0)
    assert load_tokenizer(tmp_path).identity == read_record(tmp_path).tokenizer
    BPETokenizer.train(texts, 280).save(tmp_path)
    with pytest.raises(UsageError, match="is not the one that made its tokens"):
        load_tokenizer(tmp_path)
    (tmp_path / BPE_FILE).unlink()
    with pytest.raises(UsageError, match=rf"{BPE_FILE} cannot be read"):
        load_tokenizer(tmp_path)


def test_a_folder_without_usable_data_is_named(folder, tmp_path):
    with pytest.raises(UsageError, match="holds no prepared data"):
        open_split(tmp_path, "train")
    prepare(["one"], ByteTokenizer(), tmp_path / "one", validation_fraction=0.0)
    with pytest.raises(UsageError, match="has no validation tokens"):
        open_split(tmp_path / "one", "validation")
    change_record(folder, lambda fields: fields.update(vocab_size="257"))
    with pytest.raises(UsageError, match=r"data\.json cannot be read"):
        open_split(folder, "train")
    change_record(folder, lambda fields: fields.pop("format"))
    with pytest.raises(UsageError, match=r"data\.json is of format 1"):
        open_split(folder, "train")
