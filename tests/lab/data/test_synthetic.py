"""The synthetic documents are a pure function of seed and index."""

import hashlib
from itertools import islice

import numpy as np

from muonsw.lab.data.synthetic import ALPHABET, MarkovSource


def test_documents_follow_from_seed_and_index():
    source = MarkovSource(seed=3)
    documents = list(islice(source, 5))
    assert documents == list(islice(MarkovSource(seed=3), 5)) == [source.document(number) for number in range(5)]
    assert documents != list(islice(MarkovSource(seed=4), 5))
    assert len(set(documents)) == 5


def test_the_documents_never_change():
    """Runs that name the fingerprint of such data depend on every character."""
    text = "\n".join(islice(MarkovSource(seed=0), 20))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "7c9734d865210f5437eddf3a03cfacb7a2df4a9b515d3863b0a5128c1ac0db87"
    )


def test_documents_have_the_length_and_the_letters_of_the_chain():
    documents = list(islice(MarkovSource(seed=1, mean_length=50.0), 1000))
    lengths = [len(text) for text in documents]
    assert min(lengths) >= 1
    assert set("".join(documents)) == set(ALPHABET)
    assert abs(np.mean(lengths) - 50.0) < 5.0 * 50.0 / 1000**0.5, "geometric lengths: five deviations"
