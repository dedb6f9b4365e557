"""Endless documents without a download: an order-1 Markov chain over 16 letters."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from string import ascii_lowercase

import numpy as np

ALPHABET = ascii_lowercase[:16]


@dataclass(frozen=True)
class MarkovSource:
    """Documents of a Markov chain over characters; ending a document is one more state of the chain.

    Examples:
        >>> source = MarkovSource(seed=1, mean_length=10.0)
        >>> set(source.document(5)) <= set(ALPHABET) and source.document(5) == source.document(5)
        True
    """

    seed: int  # decides the chain and the documents
    mean_length: float = 512.0  # characters in a document, on average; lengths are geometric

    def __iter__(self) -> Iterator[str]:
        return map(self.document, count())

    def document(self, index: int) -> str:
        """The document with this index, from 0: a pure function of the seed and the index."""
        uniform = np.random.default_rng([self.seed, 1, index])
        end = state = len(ALPHABET)
        characters = []
        while (state := bisect_right(self._thresholds[state], uniform.random())) != end:
            characters.append(ALPHABET[state])
        return "".join(characters)

    @cached_property
    def _thresholds(self) -> list[list[float]]:
        """Cumulative transition probabilities, a row for each state; the last state is the end of a document."""
        size = len(ALPHABET)
        # Squared exponential variables from plain uniforms: numpy promises to keep those, not its other distributions.
        weights = -np.log1p(-np.random.default_rng([self.seed, 0]).random((size, size)))
        between = weights**2.0
        between /= between.sum(axis=1, keepdims=True)
        # A document starts from the stationary distribution of its characters: p T = p with sum 1.
        equations = np.vstack([between.T - np.eye(size), np.ones((1, size))])
        start = np.linalg.lstsq(equations, np.eye(size + 1)[size], rcond=None)[0]
        chain = np.zeros((size + 1, size + 1))
        chain[:size, :size] = between * (1.0 - 1.0 / self.mean_length)
        chain[:size, size] = 1.0 / self.mean_length
        chain[size, :size] = start
        rows: list[list[float]] = np.cumsum(chain, axis=1)[:, :-1].tolist()
        return rows
