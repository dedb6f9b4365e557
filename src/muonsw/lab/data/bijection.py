"""A shuffle that is computed, not stored: a keyed bijection on range(n) in constant memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Bijection:
    """A permutation of range(size) that its key decides.

    A Feistel network permutes the smallest range(4**h) that holds range(size); an image that falls outside is permuted
    again until it falls inside, which takes fewer than four rounds on average.

    Examples:
        >>> shuffle = Bijection(10, (42, 0))
        >>> sorted(shuffle(np.arange(10)).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> shuffle.at(3) == shuffle(np.arange(10)).tolist()[3]
        True
    """

    size: int  # how many indices there are, at least 1
    key: tuple[int, ...]  # any integers, for example a seed and an epoch
    _half_bits: int = field(init=False, repr=False, compare=False)
    _round_keys: tuple[np.uint64, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.size <= LARGEST:
            raise ValueError(f"a bijection permutes 1 to 2**62 indices, not {self.size}")
        digest = hashlib.blake2b(repr(tuple(map(int, self.key))).encode(), digest_size=8 * ROUNDS).digest()
        object.__setattr__(self, "_half_bits", ((self.size - 1).bit_length() + 1) // 2)
        object.__setattr__(self, "_round_keys", tuple(np.frombuffer(digest, dtype="<u8").astype(np.uint64)))

    def __call__(self, indices: npt.ArrayLike) -> Indices:
        """The images of indices in range(size), in an array of the same shape."""
        given = np.asarray(indices, dtype=np.int64)
        if given.size and (given.min() < 0 or given.max() >= self.size):
            raise IndexError(f"indices from {given.min()} to {given.max()} are not all in range({self.size})")
        images = self._permute(given.ravel().astype(np.uint64))
        while (outside := np.flatnonzero(images >= np.uint64(self.size))).size:
            images[outside] = self._permute(images[outside])
        return images.astype(np.int64).reshape(given.shape)

    def at(self, index: int) -> int:
        """The image of one index."""
        return int(self([index])[0])

    def _permute(self, words: _Words) -> _Words:
        """One pass of the network over range(4**half_bits)."""
        bits = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = words >> bits, words & mask
        for key in self._round_keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return (left << bits) | right


def _mixed(words: _Words) -> _Words:
    """Every bit of the result depends on every bit of the word; arithmetic is modulo 2**64."""
    for shift, multiplier in _MIX:
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(multiplier)
    return words ^ (words >> np.uint64(_LAST_SHIFT))
