"""Documents that a small model can learn: a Markov chain over 16 letters."""

import json
from bisect import bisect_right
from itertools import count, islice
from string import ascii_lowercase

import numpy as np


def markov_texts(seed):
    """Endless random documents, 512 characters long on average."""
    letters, mean_length = ascii_lowercase[:16], 512.0
    end = size = len(letters)  # the end of a document is a state of the chain
    # Squared exponential variables, from uniform ones because numpy may change its other distributions.
    between = (-np.log1p(-np.random.default_rng([seed, 0]).random((size, size)))) ** 2.0
    between /= between.sum(axis=1, keepdims=True)
    # A document starts from the stationary distribution: p T = p with sum 1.
    equations = np.vstack([between.T - np.eye(size), np.ones((1, size))])
    start = np.linalg.lstsq(equations, np.eye(size + 1)[size], rcond=None)[0]
    chances = np.zeros((size + 1, size + 1))
    chances[:size, :size] = between * (1.0 - 1.0 / mean_length)
    chances[:size, size] = 1.0 / mean_length
    chances[size, :size] = start
    thresholds = np.cumsum(chances, axis=1)[:, :-1].tolist()
    for index in count():
        uniform, state, text = np.random.default_rng([seed, 1, index]), end, ""
        while (state := bisect_right(thresholds[state], uniform.random())) != end:
            text += letters[state]
        yield text


def write_texts(path, documents, seed=0):
    """Write documents of the chain as JSON lines."""
    lines = (json.dumps({"text": text}) + "\n" for text in islice(markov_texts(seed), documents))
    path.write_text("".join(lines), encoding="utf-8")
    return path
