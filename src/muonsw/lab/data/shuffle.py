"""A shuffle that is computed, not stored: a keyed permutation of range(n) in constant memory."""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Indices: TypeAlias = npt.NDArray[np.int64]
_Words: TypeAlias = npt.NDArray[np.uint64]

ROUNDS = 8
LARGEST = 1 << 62
# the multipliers and shifts of SplitMix64's finalizer (Steele, Lea and Flood 2014; Stafford's variant 13)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def shuffled(indices: Indices, size: int, key: tuple[int, ...]) -> Indices:
    """Where a permutation of range(size) sends these indices; the key, any integers, decides it.

    A Feistel network permutes the smallest range(4**h) that holds range(size); an image that falls outside is permuted
    again until it falls inside, which takes fewer than four rounds on average.

    Examples:
        >>> shuffled(np.arange(10), 10, (42, 0)).tolist()
        [3, 8, 7, 2, 4, 0, 6, 1, 5, 9]
    """
    if not 1 <= size <= LARGEST:
        raise ValueError(f"a shuffle permutes 1 to 2**62 indices, not {size}")
    if indices.size and (indices.min() < 0 or indices.max() >= size):
        raise IndexError(f"indices from {indices.min()} to {indices.max()} are not all in range({size})")
    half_bits = ((size - 1).bit_length() + 1) // 2
    digest = hashlib.blake2b(repr(tuple(map(int, key))).encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    images = _permuted(indices.astype(np.uint64), half_bits, keys)
    while (outside := np.flatnonzero(images >= np.uint64(size))).size:
        images[outside] = _permuted(images[outside], half_bits, keys)
    return images.astype(np.int64)


def _permuted(words: _Words, half_bits: int, keys: _Words) -> _Words:
    """One pass of the network over range(4**half_bits)."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = words >> bits, words & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << bits) | right


def _mixed(words: _Words) -> _Words:
    """Every bit of the result depends on every bit of the word; arithmetic is modulo 2**64."""
    for shift, multiplier in _MIX:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(multiplier)
    return words ^ (words >> np.uint64(_LAST_SHIFT))
