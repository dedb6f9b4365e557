"""Small shards for the tests of the data folder."""

import hashlib

import numpy as np

from muonsw.lab.data.shards import open_shard, write_shard

TOKENIZER = hashlib.sha256(b"a tokenizer").hexdigest()
FOREIGN = hashlib.sha256(b"another tokenizer").hexdigest()


def make_shards(folder, *counts, vocab_size=50_000):
    """Shards of the given lengths; their tokens count upwards, so that every token says where it came from."""
    shards, first = [], 0
    for number, count in enumerate(counts):
        path = folder / f"train-{number:05}.tokens"
        write_shard(path, np.arange(first, first + count), vocab_size=vocab_size, tokenizer=TOKENIZER)
        shards.append(open_shard(path, tokenizer=TOKENIZER))
        first += count
    return shards
