"""The batch of a step is a pure function of the seed and the step."""

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw.lab.data.loader import Shard, ShardError, TokenLoader, ValidationLoader, Windows, open_split, prefetch
from muonsw.lab.data.prepare import prepare
from muonsw.lab.data.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def shards():
    """Tokens count upwards through the shards, so that every token says where it came from."""
    ends = np.cumsum([100, 3, 41, 9, 250])
    parts = zip(ends - np.diff(ends, prepend=0), ends, strict=True)
    return [Shard(Path(f"shard-{first}"), np.arange(first, last), 403) for first, last in parts]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def joined(batches):
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def starts(loader, steps):
    """The first token of every window that the steps read; it names the window, tokens being numbered."""
    return torch.cat([loader.batch_at(step)[0][:, 0] for step in steps]).tolist()


@pytest.mark.parametrize("sequence", [1, 2, 8, 40])
def test_windows_stay_inside_their_shard_and_targets_follow_inputs(shards, sequence):
    windows = Windows(shards, sequence)
    inputs, targets = windows.gather(np.arange(windows.count))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (windows.count, sequence)
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, inputs + 1), "tokens are numbered, so a target is its input plus one"
    ends = np.cumsum([len(shard.tokens) for shard in shards])
    first, last = (np.searchsorted(ends, tokens.numpy(), side="right") for tokens in (inputs[:, 0], targets[:, -1]))
    assert np.array_equal(first, last), "no window crosses a shard's end"
    assert len(targets.unique()) == targets.numel(), "no token is a target twice"
    covered = [(len(shard.tokens) - 1) // sequence * sequence + 1 for shard in shards if len(shard.tokens) > sequence]
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


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), step=st.integers(0, 10**15))
def test_a_batch_depends_on_seed_and_step_alone(shards, seed, step):
    loader = TokenLoader(shards, 8, 12, seed)
    first = loader.batch_at(step)
    loader.batch_at(step + 1)
    again = TokenLoader(tuple(shards), 8, 12, seed).batch_at(step)
    assert same(first, loader.batch_at(step))
    assert same(first, again)
    assert not same(first, TokenLoader(shards, 8, 12, seed + 1).batch_at(step))


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 1), (1, 12), (12, 1), (2, 3), (6, 4)])
def test_any_split_reassembles_to_the_batch(shards, ranks, accumulation):
    loader = TokenLoader(shards, 2, 144, 7)
    for step in (0, 1, 5):
        per_rank = [
            list(loader.micro_batches(step, ranks=ranks, rank=r, accumulation=accumulation)) for r in range(ranks)
        ]
        assert all(len(micro) == accumulation for micro in per_rank)
        in_order = [per_rank[rank][micro] for micro in range(accumulation) for rank in range(ranks)]
        assert same(joined(in_order), loader.batch_at(step))


@pytest.mark.parametrize(("start", "ahead"), [(0, 2), (4, 30)])
def test_resuming_at_any_step_equals_the_uninterrupted_sequence(shards, start, ahead):
    loader = TokenLoader(shards, 8, 12, 3)
    batches = [loader.batch_at(step) for step in range(12)]
    resumed = list(prefetch(loader.batch_at, start, 12, ahead=ahead))
    assert len(resumed) == 12 - start
    assert all(same(*pair) for pair in zip(resumed, batches[start:], strict=True))


def prefetching():
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_prefetching_reads_ahead_and_ends_its_thread():
    read = []
    items = prefetch(lambda step: read.append(step) or step, 5, 100, ahead=3)
    assert not prefetching(), "nothing runs before the first item is asked for"
    assert [next(items) for _ in range(4)] == [5, 6, 7, 8]
    items.close()
    assert not prefetching()
    assert read == list(range(5, 5 + len(read)))
    assert len(read) <= 4 + 3


def test_an_error_while_prefetching_is_raised_in_its_place():
    def read(step):
        if step == 2:
            raise OSError("the disk is gone")
        return step

    items = prefetch(read, 0, 5)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        next(items)
    assert not prefetching()


def test_a_limit_visits_the_first_windows_only(shards):
    loader = TokenLoader(shards, 8, 5, 0, limit=10)
    assert sorted(starts(loader, range(2))) == [8 * window for window in range(10)]
    assert loader.epochs(4) == 2.0


def test_validation_reads_the_same_windows_whatever_the_batch_and_the_ranks(shards):
    every = joined(ValidationLoader(shards, 8, 1000))
    assert len(every[0]) == Windows(shards, 8).count
    for batch in (1, 7, 16):
        loader = ValidationLoader(shards, 8, batch)
        assert len(list(loader)) == len(loader)
        assert same(joined(loader), every)
        per_rank = [list(loader.parts(ranks=3, rank=rank)) for rank in range(3)]
        assert len({len(parts) for parts in per_rank}) == 1, "every rank has as many batches"
        in_turn = [part for parts in zip(*per_rank, strict=True) for part in parts]
        assert same(joined(tuple(rows[:count] for rows in part) for part, count in in_turn), every)


@pytest.mark.parametrize("windows", [1, 5, 20, 10_000])
def test_validation_windows_are_different_and_spread(shards, windows):
    loader = ValidationLoader(shards, 8, 4, windows)
    assert len(loader.ids) == min(windows, loader.windows.count) == len(np.unique(loader.ids))
    gaps = np.diff([*loader.ids, loader.windows.count])
    assert gaps.max() - gaps.min() <= 1


def test_a_corpus_that_is_too_short_is_refused(shards):
    with pytest.raises(ValueError, match=r"no shard holds one window of 251 tokens \(403 tokens in 5 shards\)"):
        TokenLoader(shards, 250, 1, 0)
    with pytest.raises(ValueError, match="the corpus has 1 windows of 250 tokens, fewer than one batch of 2"):
        TokenLoader(shards, 249, 2, 0)
    assert TokenLoader(shards, 249, 1, 0).batch_at(3)[0].shape == (1, 249)


def test_a_token_that_no_model_knows_is_refused_with_its_shard(shards):
    limited = [shard._replace(vocab_size=120) for shard in shards]
    with pytest.raises(ShardError, match=r"shard-103 holds the token 1\d\d, outside the vocabulary of 120"):
        TokenLoader(limited[:3], 8, 17, 0).batch_at(0)


def test_the_order_of_the_data_never_changes(tmp_path):
    """A hash of batches as they have always been: seed and step alone decide them, on every machine."""
    documents = [f"document {number} " * (number % 17 + 1) for number in range(200)]
    prepare(documents, ByteTokenizer(), tmp_path, validation_fraction=0.2, group_characters=3000)
    training = TokenLoader(open_split(tmp_path, "train"), sequence=16, batch=6, seed=7)
    held_out = ValidationLoader(open_split(tmp_path, "validation"), sequence=16, batch=4, windows=30)
    digest = hashlib.sha256()
    for batch in [*(training.batch_at(step) for step in (0, 1, 2, 1000, 10**9)), *held_out]:
        for part in batch:
            digest.update(part.numpy().astype("<i8").tobytes())
    assert digest.hexdigest() == "157acfaf39fe33ee16b46ec5dee4ea43e7ea0c4c3fc3f7de809ab768d9272d79"
