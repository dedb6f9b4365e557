"""The shuffle is a permutation of every range, decided by its key and by nothing else."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muonsw.lab.data.shuffle import LARGEST, shuffled

KEYS = st.tuples(st.integers(0, 2**70), st.integers(0, 1000))


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 5000), key=KEYS)
def test_it_permutes_its_range(size, key):
    assert np.array_equal(np.sort(shuffled(np.arange(size), size, key)), np.arange(size))


@pytest.mark.parametrize("size", [*range(1, 70), 4**5 - 1, 4**5, 4**5 + 1, 2 * 4**5, 2 * 4**5 + 1])
def test_it_permutes_small_ranges_and_those_next_to_powers(size):
    assert sorted(shuffled(np.arange(size), size, (size, 0)).tolist()) == list(range(size))


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, LARGEST), key=KEYS, data=st.data())
def test_it_stays_injective_in_huge_ranges(size, key, data):
    indices = np.unique([data.draw(st.integers(0, size - 1)) for _ in range(20)])
    images = shuffled(indices, size, key)
    assert len(np.unique(images)) == len(indices)
    assert images.min() >= 0
    assert images.max() < size


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, LARGEST), key=KEYS, data=st.data())
def test_one_index_equals_many(size, key, data):
    indices = data.draw(st.lists(st.integers(0, size - 1), min_size=4, max_size=4))
    images = shuffled(np.array(indices), size, key)
    assert images.dtype == np.int64
    assert images.tolist() == [image(index, size, key) for index in indices]


def image(index, size, key):
    return int(shuffled(np.array([index]), size, key)[0])


def test_the_order_is_pinned():
    """A change here changes the data order of every run that is resumed."""
    assert shuffled(np.arange(10), 10, (42, 0)).tolist() == PINNED
    assert image(123_456_789, 10**12, (42, 1)) == PINNED_LARGE


PINNED = [3, 8, 7, 2, 4, 0, 6, 1, 5, 9]
PINNED_LARGE = 170_494_739_426


def reference(size, key, index):
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
def test_it_equals_the_plain_reference(size, key, data):
    index = data.draw(st.integers(0, size - 1))
    assert image(index, size, key) == reference(size, key, index)


def test_keys_decide_the_order():
    def order(*key):
        return shuffled(np.arange(100), 100, key).tolist()

    orders = [order(0, 0), order(0, 1), order(1, 0), order(1, 1), order(-1, 0), order(2**64, 0)]
    assert len({tuple(one) for one in orders}) == len(orders)
    assert order(5, 7) == order(5, 7)


@pytest.mark.parametrize("size", [3, 7, 20])
def test_every_image_of_every_index_is_about_equally_likely(size):
    """Chi-squared with (size - 1) degrees of freedom for each index: mean k, variance 2k; six deviations."""
    keys = 500
    images = np.stack([shuffled(np.arange(size), size, (key, 3)) for key in range(keys)])
    expected, freedom = keys / size, size - 1
    for column in images.T:
        statistic = float(((np.bincount(column, minlength=size) - expected) ** 2 / expected).sum())
        assert statistic < freedom + 6.0 * (2.0 * freedom) ** 0.5


def test_neighbours_do_not_stay_neighbours():
    """The correlation of n pairs from a random permutation has deviation 1/sqrt(n)."""
    size = 10_000
    images = shuffled(np.arange(size), size, (0, 0))
    for lag in (1, 2, 64, 100):
        assert abs(np.corrcoef(images[:-lag], images[lag:])[0, 1]) < 5.0 / (size - lag) ** 0.5
    assert abs(np.corrcoef(images, np.arange(size))[0, 1]) < 5.0 / size**0.5


def test_what_is_outside_is_refused():
    with pytest.raises(ValueError, match="not 0"):
        shuffled(np.arange(0), 0, (0,))
    with pytest.raises(ValueError, match="2\\*\\*62"):
        shuffled(np.arange(0), LARGEST + 1, (0,))
    for index in (-1, 5):
        with pytest.raises(IndexError, match="range\\(5\\)"):
            image(index, 5, (0,))
    assert shuffled(np.arange(0), 5, (0,)).shape == (0,)
