"""Symmetric matrices in the room of one triangle."""

import pytest
import torch

from muonsw.algorithms.triangles import pack, packed_shape, unpack


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, 33])
def test_packing_is_exact_and_takes_one_triangle(size):
    A = torch.randn(3, size, size)
    A = A + A.mT
    packed = pack(A)
    assert packed.shape == (3, *packed_shape(size))
    assert packed[0].numel() == size * (size + 1) // 2
    assert torch.equal(unpack(packed), A)
    assert torch.equal(pack(unpack(packed)), packed)
    assert packed[0].unique().numel() == size * (size + 1) // 2  # each element once
