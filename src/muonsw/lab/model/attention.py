"""Causal self-attention with rotary positions, one fused matrix for queries, keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from muonsw.lab.model.config import ModelConfig
from muonsw.lab.model.layers import Linear
from muonsw.lab.model.precision import at_least_float32

Rotary = tuple[Tensor, Tensor]


class Attention(nn.Module):
    """Causal attention with muP's scale `1/head_dim`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        """Mix each position with those before it."""
        heads = [part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.qkv(x_BTD).chunk(3, dim=-1)]
        q_BHTC, k_BHTC, v_BHTC = rotate(heads[0], rotary), rotate(heads[1], rotary), heads[2]
        mixed_BHTC = functional.scaled_dot_product_attention(
            q_BHTC, k_BHTC, v_BHTC, is_causal=True, scale=1 / self.head_dim
        )
        out: Tensor = self.out(mixed_BHTC.transpose(1, 2).flatten(2))
        return out


def rotary_table(length: int, head_dim: int, theta: float, *, start: int = 0) -> Rotary:
    """Cosines and sines (T, C/2) of positions `start` to `start + length`, in float64: large angles matter."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle_TC = torch.arange(start, start + length, dtype=torch.float64)[:, None] * frequency
    return angle_TC.cos(), angle_TC.sin()


def rotate(x_BHTC: Tensor, rotary: Rotary) -> Tensor:
    """Rotate pair (i, i + C/2) of each position by its angle, in float32."""
    cos, sin = rotary
    first, second = at_least_float32(x_BHTC).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BHTC.dtype)
