"""The shuffle is a permutation of every range, decided by its key alone."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw.lab.data.loader import LARGEST, shuffled

KEYS = st.tuples(st.integers(0, 2**70), st.integers(0, 1000))


def test_it_permutes_every_range_in_an_order_that_the_key_decides():
    for size in (*range(1, 70), 4**5 - 1, 4**5, 4**5 + 1, 2 * 4**5, 2 * 4**5 + 1):
        assert np.array_equal(np.sort(shuffled(np.arange(size), size, (size, 0))), np.arange(size)), size
    keys = [(0, 0), (0, 1), (1, 0), (1, 1), (-1, 0), (2**64, 0)]
    assert len({tuple(shuffled(np.arange(100), 100, key).tolist()) for key in keys}) == len(keys)


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
@given(size=st.integers(1, LARGEST), key=KEYS, data=st.data())
def test_it_equals_the_plain_reference_and_stays_injective(size, key, data):
    indices = data.draw(st.lists(st.integers(0, size - 1), max_size=5, unique=True))
    images = shuffled(np.array(indices, dtype=np.int64), size, key)
    assert images.tolist() == [reference(index, size, key) for index in indices]
    assert len(set(images.tolist())) == len(indices)


def test_the_order_is_pinned():
    """A change here changes the data order of every run that is resumed."""
    assert shuffled(np.arange(10), 10, (42, 0)).tolist() == [3, 8, 7, 2, 4, 0, 6, 1, 5, 9]
    assert shuffled(np.array([123_456_789]), 10**12, (42, 1)).tolist() == [170_494_739_426]


def test_what_is_outside_is_refused():
    for size in (0, LARGEST + 1):
        with pytest.raises(ValueError, match=f"not {size}"):
            shuffled(np.arange(0), size, (0,))
    for index in (-1, 5):
        with pytest.raises(IndexError, match=r"range\(5\)"):
            shuffled(np.array([index]), 5, (0,))
