"""The decoder: embedding, blocks of attention and experts, and the tied head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from muonsw.lab.model.config import ModelConfig, initialize, scalings
from muonsw.lab.model.layers import FeedForwardOutput, Linear, MoE, RMSNorm, at_least_float32
from muonsw.lab.model.loss import cross_entropy

Rotary = tuple[Tensor, Tensor]


class Losses(NamedTuple):
    """The loss (`total`) and its parts."""

    total: Tensor
    cross_entropy: Tensor
    balance: Tensor  # mean over layers, without its coefficient
    z: Tensor  # mean over layers, without its coefficient


class Attention(nn.Module):
    """Causal attention with muP's scale `1/head_dim`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        qkv_BTD = self.qkv(x_BTD).chunk(3, dim=-1)
        q_BHTC, k_BHTC, v_BHTC = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in qkv_BTD)
        mixed_BHTC = functional.scaled_dot_product_attention(
            rotate(q_BHTC, rotary), rotate(k_BHTC, rotary), v_BHTC, is_causal=True, scale=1 / self.head_dim
        )
        out: Tensor = self.out(mixed_BHTC.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """One layer: attention, then experts, each with a norm before it, added to the stream with muP's multiplier."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.moe_norm = RMSNorm(config.width, config.norm_eps)
        self.moe = MoE(config)
        self.multiplier = scalings(config)["residual"].multiplier

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> FeedForwardOutput:
        x_BTD = x_BTD + self.multiplier * self.attention(self.attention_norm(x_BTD), rotary)
        branch: FeedForwardOutput = self.moe(self.moe_norm(x_BTD))
        # Not `_replace`: torch 2.11 cannot compile it if a layer is a separate graph, as with FSDP.
        return FeedForwardOutput(x_BTD + self.multiplier * branch.x, branch.balance, branch.z)


class Decoder(nn.Module):
    """LLaMA-style decoder in muP with a mixture of experts and a tied head.

    Args:
        config: shape and constants.
        seed: of the initial weights; None leaves them uninitialized.

    Examples:
        >>> model = Decoder(ModelConfig(width=32, layers=2, head_dim=16, vocab=50, sequence=8))
        >>> tokens = torch.arange(18).view(2, 9)
        >>> losses = model(tokens[:, :-1], tokens[:, 1:])
        >>> losses.total.backward()
        >>> model.logits(tokens[:, :-1]).shape
        torch.Size([2, 8, 50])
    """

    def __init__(self, config: ModelConfig, seed: int | None = 0) -> None:
        super().__init__()
        self.config = config
        self.rotary: Tensor
        table = scalings(config)
        self.embedding_multiplier, self.head_multiplier = table["embedding"].multiplier, table["head"].multiplier
        # Given a matrix, nn.Embedding does not initialize it.
        self.embedding = nn.Embedding(config.vocab, config.width, _weight=torch.empty(config.vocab, config.width))
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        # A buffer, because the compiler would recompute powers and cosines in every kernel that rotates.
        table_2TC = torch.stack(rotary_table(config.sequence, config.head_dim, config.rope_theta))
        self.register_buffer("rotary", table_2TC, persistent=False)
        if seed is not None:
            initialize(self, config, seed)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Losses:
        x_BTD, balance, z = self.hidden(tokens_BT)
        ce = cross_entropy(x_BTD.flatten(0, 1), self.embedding.weight, targets_BT.flatten(), scale=self.head_multiplier)
        return Losses(ce + self.config.balance_coef * balance + self.config.z_coef * z, ce, balance, z)

    def hidden(self, tokens_BT: Tensor) -> FeedForwardOutput:
        """The input of the head, with the router losses averaged over layers."""
        x = self.embedding(tokens_BT) * self.embedding_multiplier
        cos_TC, sin_TC = self.rotary[:, : tokens_BT.shape[1]].to(at_least_float32(x).dtype)
        routers = []
        for layer in self.layers:
            x, *router = layer(x, (cos_TC, sin_TC))
            routers.append(router)
        balance, z = (torch.stack(values).mean() for values in zip(*routers, strict=True))
        return FeedForwardOutput(self.norm(x), balance, z)

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of the next token at each position."""
        return functional.linear(self.hidden(tokens_BT).x, self.embedding.weight) * self.head_multiplier

    def fused_projections(self) -> dict[str, tuple[int, ...]]:
        """Name patterns of matrices that hold several projections, with their output sizes."""
        width, ff = self.config.width, self.config.ff_width
        return {"*.attention.qkv.weight": (width, width, width), "*.gate_up": (ff, ff)}


class ModelSize(NamedTuple):
    total: int  # parameters; the tied matrix counts once
    active: int  # parameters that one token uses: all except those of the other experts
    flops_per_token: int  # of training: six per active parameter, plus causal attention at the longest sequence


def count(config: ModelConfig) -> ModelSize:
    total = sum(param.numel() for param in unallocated(config).parameters())
    expert = 3 * config.width * config.ff_width  # gate, up and down
    active = total - config.layers * (config.experts - config.top_k) * expert
    # Scores and mixing need 2*2*T*D per layer, half of that if causal, and three times as much with the backward pass.
    attention = 6 * config.layers * config.width * config.sequence
    return ModelSize(total, active, 6 * active + attention)


def unallocated(config: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config, seed=None)


def rotary_table(length: int, head_dim: int, theta: float) -> Rotary:
    """Cosines and sines (T, C/2) of the first positions, in float64 for accurate large angles."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle_TC = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle_TC.cos(), angle_TC.sin()


def rotate(x_BHTC: Tensor, rotary: Rotary) -> Tensor:
    """Rotate pair (i, i + C/2) of each position by its angle, in float32."""
    cos, sin = rotary
    first, second = at_least_float32(x_BHTC).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BHTC.dtype)
