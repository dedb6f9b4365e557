"""Small shards for the tests of the data folder."""

import numpy as np

from muonsw.lab.data.shards import DataRecord, Group, open_shard, shard_path, write_shard

DIGEST = "0123456789abcdef"


def record_of(vocab_size=50_000, **fields):
    return DataRecord("ab" * 32, vocab_size, validation_fraction=0.1, group_characters=1000, **fields)


def make_shards(folder, *counts, vocab_size=50_000):
    """Shards of the given lengths; their tokens count upwards, so that every token says where it came from."""
    shards, first, record = [], 0, record_of(vocab_size)
    for number, count in enumerate(counts):
        path = shard_path(folder, "train", number, DIGEST)
        size, checksum = write_shard(path, [np.arange(first, first + count)], record)
        shards.append(open_shard(path, Group(DIGEST, 1, {"train": size}, {"train": checksum}), "train", record))
        first += count
    return shards


def damage(path):
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
