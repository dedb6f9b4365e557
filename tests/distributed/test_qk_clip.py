"""Ranks clip by the largest logits of all ranks; each scales its shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from muonsw import HeadRows, QKClip
from tests.distributed.problems import initial, mesh_of

HEADS, KEYS, SIZE, WIDTH = 6, 2, 3, 7
THRESHOLD = 4.0


def logits(rank):
    return 10 * torch.rand(HEADS, generator=torch.Generator().manual_seed(rank))


def weights(make):
    shapes = [(HEADS * SIZE, WIDTH), (HEADS * SIZE,), ((KEYS + KEYS) * SIZE, WIDTH), (WIDTH, KEYS * SIZE)]
    return [nn.Parameter(make(initial(shape, number))) for number, shape in enumerate(shapes)]


def clip_of(params):
    """Queries with a bias; keys in a fused weight before the values, and in a weight stored as (in, out)."""
    query, bias, fused, stored = params
    clip = QKClip(THRESHOLD)
    keys = [HeadRows(fused, SIZE), HeadRows(stored, dim=1)]
    return clip, clip.add(query=[query, bias], key=keys, heads=HEADS, key_heads=KEYS)


def clipped(shape, axes):
    mesh = mesh_of(*shape)

    def spread(value):
        places = [Replicate() if a is None else Shard(min(a, value.dim() - 1)) for a in axes]
        return distribute_tensor(value, mesh, places, src_data_rank=None)

    together, alone = weights(spread), weights(lambda value: value)
    rank = dist.get_rank()
    clip, attention = clip_of(together)
    if rank != 1:  # which observes nothing
        attention.observe(logits(rank))
    maxima = clip.step()

    (whole, attention), every = clip_of(alone), torch.stack([logits(other) for other in (0, 2, 3)]).amax(0)
    attention.observe(every)
    whole.step()
    same = all(torch.equal(a.detach().full_tensor(), b.detach()) for a, b in zip(together, alone, strict=True))
    return same, torch.equal(maxima, every)


@pytest.mark.parametrize(
    ("shape", "axes"), [([4], (0,)), ([4], (1,)), ([2, 2], (0, 0)), ([2, 2], (0, 1)), ([2, 2], (None, 0))], ids=str
)
def test_shards_are_scaled_like_full_weights(pool, shape, axes):
    assert pool.run(clipped, shape, axes) == [(True, True)] * 4


def divided_heads():
    """Tensor parallelism: two ranks see the first half of the heads, two the second."""
    params = weights(lambda value: value)
    clip, attention = clip_of(params)
    first = HEADS // 2 * (dist.get_rank() % 2)
    attention.observe(logits(9)[first : first + HEADS // 2] + dist.get_rank(), first_head=first)
    return clip.step()


def test_ranks_may_observe_different_heads(pool):
    expected = logits(9) + torch.tensor([2.0, 3.0]).repeat_interleave(HEADS // 2)
    assert all(torch.equal(found, expected) for found in pool.run(divided_heads))
