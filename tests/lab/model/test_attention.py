"""Rotary positions are relative, and attention is what it says."""

import pytest
import torch

from muonsw.lab.model.decoder import Attention, rotary_table, rotate
from tests.lab.model.small_models import small


@pytest.mark.parametrize("shift", [1, 17, 1000])
def test_scores_depend_on_relative_positions_alone(shift):
    q, k = torch.randn(2, 1, 1, 12, 64, dtype=torch.float64)
    here = rotary_table(12, 64, 10000.0)
    there = rotary_table(12, 64, 10000.0, start=shift)
    scores = rotate(q, here) @ rotate(k, here).mT
    # angles are rounded at relative 2^-53 and reach the shift
    torch.testing.assert_close(rotate(q, there) @ rotate(k, there).mT, scores, rtol=0, atol=1e-10)


def test_rotation_keeps_lengths_and_leaves_position_zero():
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    rotated = rotate(x, rotary_table(5, 8, 10000.0))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotated[:, :, 0], x[:, :, 0])
    assert not torch.allclose(rotated[:, :, 1], x[:, :, 1])


def test_first_pair_turns_by_one_radian_a_position():
    cos, sin = rotary_table(3, 8, 10000.0)
    torch.testing.assert_close(cos[:, 0], torch.arange(3, dtype=torch.float64).cos())
    torch.testing.assert_close(sin[:, -1], (torch.arange(3, dtype=torch.float64) * 10000 ** (-6 / 8)).sin())


def test_attention_is_softmax_of_scores_over_head_dim():
    config = small()
    attention = Attention(config).double()
    with torch.no_grad():
        for param in attention.parameters():
            param.normal_()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    table = rotary_table(6, config.head_dim, config.rope_theta)
    q, k, v = (
        (x @ matrix.T).view(2, 6, config.heads, config.head_dim).transpose(1, 2)
        for matrix in attention.qkv.weight.split(config.width)
    )
    scores = rotate(q, table) @ rotate(k, table).mT / config.head_dim
    weights = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(dim=-1)
    expected = (weights @ v).transpose(1, 2).reshape(2, 6, 16) @ attention.out.weight.T
    torch.testing.assert_close(attention(x, table), expected)
