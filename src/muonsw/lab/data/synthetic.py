"""An endless source whose entropy is known, so that a model's loss on it has a known floor."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from string import ascii_lowercase
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Matrix: TypeAlias = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class MarkovSource:
    """Documents from an order-1 Markov chain over characters; ending a document is one more state of the chain.

    With a tokenizer that gives every character one token, the stream of tokens, ends of documents included, is that
    chain, and no model's expected loss is below `entropy_rate()`.

    Examples:
        >>> source = MarkovSource(seed=1, alphabet="ab", sharpness=0.0, mean_length=10.0)
        >>> round(source.entropy_rate(), 4)  # log 2 for a character, and more for when the document ends
        0.9257
        >>> set(source.document(5)) <= {"a", "b"} and source.document(5) == source.document(5)
        True
    """

    seed: int  # decides the chain and the documents
    alphabet: str = ascii_lowercase[:16]  # different characters
    sharpness: float = 2.0  # 0 makes all transitions equally likely, larger values the next one more predictable
    mean_length: float = 512.0  # characters in a document, on average; lengths are geometric

    def __iter__(self) -> Iterator[str]:
        """All documents, without end."""
        return map(self.document, count())

    def document(self, index: int) -> str:
        """The document with this index, from 0: a pure function of the seed and the index."""
        uniform = np.random.default_rng([self.seed, 1, index])
        rows = [row.tolist() for row in np.cumsum(self.transitions, axis=1)[:, :-1]]
        end = state = len(self.alphabet)
        characters = []
        while (state := bisect_right(rows[state], uniform.random())) != end:
            characters.append(self.alphabet[state])
        return "".join(characters)

    def entropy_rate(self) -> float:
        """Nats for each token, a character or the end of a document."""
        return float(_stationary(self.transitions) @ _entropy(self.transitions))

    @cached_property
    def transitions(self) -> Matrix:
        """Transition probabilities, rows from and columns to; the last state is the end of a document.

        A document starts from the distribution that the characters keep, so every character has the same marginal.
        """
        size = len(self.alphabet)
        # powers of exponential variables, from plain uniforms: numpy promises those, not its other distributions
        weights = -np.log1p(-np.random.default_rng([self.seed, 0]).random((size, size)))
        between = weights**self.sharpness
        between /= between.sum(axis=1, keepdims=True)
        chain = np.zeros((size + 1, size + 1))
        chain[:size, :size] = between * (1.0 - 1.0 / self.mean_length)
        chain[:size, size] = 1.0 / self.mean_length
        chain[size, :size] = _stationary(between)
        return chain


def _stationary(transitions: Matrix) -> Matrix:
    """The distribution p with p T = p and sum 1."""
    size = len(transitions)
    equations = np.vstack([transitions.T - np.eye(size), np.ones((1, size))])
    solution: Matrix = np.linalg.lstsq(equations, np.eye(size + 1)[size], rcond=None)[0]
    return solution


def _entropy(distributions: Matrix) -> Matrix:
    """Of each row, in nats."""
    logarithms = np.log(distributions, out=np.zeros_like(distributions), where=distributions > 0.0)
    rows: Matrix = -(distributions * logarithms).sum(axis=1)
    return rows
