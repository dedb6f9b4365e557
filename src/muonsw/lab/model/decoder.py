"""The decoder: embedding, blocks of attention and experts on a residual stream, and the tied head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from muonsw.lab.model.config import ModelConfig, initialize, scalings
from muonsw.lab.model.layers import DenseFeedForward, FeedForwardOutput, Linear, MoE, RMSNorm, at_least_float32
from muonsw.lab.model.loss import cross_entropy

Rotary = tuple[Tensor, Tensor]


class Losses(NamedTuple):
    """What is minimised (`total`) and its parts; the router's are means over layers, before their coefficients.

    `load` is what is not minimised: the share of rows that each expert of each layer got, (layers, experts).
    """

    total: Tensor
    cross_entropy: Tensor
    balance: Tensor
    z: Tensor
    load: Tensor


class Attention(nn.Module):
    """Causal attention with muP's scale `1/head_dim`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.qkv = Linear(config.width, 3 * config.width)
        self.out = Linear(config.width, config.width)

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        q_BHTC, k_BHTC, v_BHTC = rotated_heads(self.qkv(x_BTD), rotary)
        mixed_BHTC = functional.scaled_dot_product_attention(
            q_BHTC, k_BHTC, v_BHTC, is_causal=True, scale=1 / self.head_dim
        )
        out: Tensor = self.out(mixed_BHTC.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """One layer: attention, then experts, each normed before and added to the stream with muP's branch multiplier."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = Attention(config)
        self.moe_norm = RMSNorm(config.width, config.norm_eps)
        self.moe = MoE(config) if config.experts > 1 else DenseFeedForward(config)
        self.multiplier = scalings(config)["residual"].multiplier

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> FeedForwardOutput:
        x_BTD = x_BTD + self.multiplier * self.attention(self.attention_norm(x_BTD), rotary)
        branch: FeedForwardOutput = self.moe(self.moe_norm(x_BTD))
        # Not `_replace`: torch 2.11 cannot compile it where a layer is a graph of its own, as under FSDP.
        return FeedForwardOutput(x_BTD + self.multiplier * branch.x, branch.balance, branch.z, branch.load)


class Decoder(nn.Module):
    """LLaMA-style decoder in muP with a mixture of experts and a tied head.

    Args:
        config: shape and constants.
        seed: of the initial weights; None leaves them unset, for the meta device or for a checkpoint to fill.

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
        # Given an empty matrix, nn.Embedding draws no values: `initialize` fills it below.
        self.embedding = nn.Embedding(config.vocab, config.width, _weight=torch.empty(config.vocab, config.width))
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        # Stored, not recomputed: a compiler would compute the powers and cosines again in every kernel that rotates.
        table_2TC = torch.stack(rotary_table(config.sequence, config.head_dim, config.rope_theta))
        self.register_buffer("rotary", table_2TC, persistent=False)
        if seed is not None:
            initialize(self, config, seed)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Losses:
        x_BTD, balance, z, load = self.hidden(tokens_BT)
        ce = cross_entropy(x_BTD.flatten(0, 1), self.embedding.weight, targets_BT.flatten(), scale=self.head_multiplier)
        return Losses(ce + self.config.balance_coef * balance + self.config.z_coef * z, ce, balance, z, load)

    def hidden(self, tokens_BT: Tensor) -> FeedForwardOutput:
        """What the head sees, with the router losses averaged over layers."""
        length = tokens_BT.shape[1]
        if length > self.config.sequence:
            raise ValueError(f"{length} tokens are longer than sequence={self.config.sequence}; shorten or raise it")
        x = self.embedding(tokens_BT) * self.embedding_multiplier
        cos_TC, sin_TC = self.rotary[:, :length].to(at_least_float32(x).dtype)
        routers = []
        for layer in self.layers:
            x, *router = layer(x, (cos_TC, sin_TC))
            routers.append(router)
        balances, zs, loads = (torch.stack(values) for values in zip(*routers, strict=True))
        return FeedForwardOutput(self.norm(x), balances.mean(), zs.mean(), loads)

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of the next token at each position, all of them at once."""
        return functional.linear(self.hidden(tokens_BT).x, self.embedding.weight) * self.head_multiplier

    def fused_projections(self) -> dict[str, tuple[int, ...]]:
        """Name patterns of matrices that hold several projections along their output axis, and the sizes of those."""
        width, ff = self.config.width, self.config.ff_width
        return {"*.attention.qkv.weight": (width, width, width), "*.gate_up": (ff, ff)}


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model."""

    total: int  # parameters; the tied matrix counts once
    active: int  # parameters that one token uses: all but the experts it is not sent to
    attention_flops: int  # FLOPs a token of causal attention, forward and backward, at the longest sequence

    @property
    def flops_per_token(self) -> int:
        """FLOPs of training on one token: six for each active parameter, and attention's."""
        return 6 * self.active + self.attention_flops


def count(config: ModelConfig) -> ModelSize:
    """Count on the meta device, from the modules that would be trained."""
    model = unallocated(config)
    total = sum(param.numel() for param in model.parameters())
    mixtures = [layer for layer in model.modules() if isinstance(layer, MoE)]
    stacks = [stack for layer in mixtures for stack in (layer.gate_up, layer.down)]
    idle = (config.experts - config.top_k) * sum(stack[0].numel() for stack in stacks)
    # Scores and mixing are 2*2*T*D each layer for a full square, half of it causal, three times with the backward.
    attention = 6 * config.layers * config.width * config.sequence
    return ModelSize(total, total - idle, attention)


def unallocated(config: ModelConfig) -> Decoder:
    """The decoder on the meta device, where tensors have shapes and no memory."""
    with torch.device("meta"):
        return Decoder(config, seed=None)


def rotary_table(length: int, head_dim: int, theta: float, *, start: int = 0) -> Rotary:
    """Cosines and sines (T, C/2) of positions `start` to `start + length`; float64, as large angles lose digits."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle_TC = torch.arange(start, start + length, dtype=torch.float64)[:, None] * frequency
    return angle_TC.cos(), angle_TC.sin()


def rotated_heads(qkv_BTD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of each head, the first two rotated."""
    head_dim = 2 * rotary[0].shape[1]
    heads = [part.view(*part.shape[:2], -1, head_dim).transpose(1, 2) for part in qkv_BTD.chunk(3, dim=-1)]
    return rotate(heads[0], rotary), rotate(heads[1], rotary), heads[2]


def rotate(x_BHTC: Tensor, rotary: Rotary) -> Tensor:
    """Rotate pair (i, i + C/2) of each position by its angle, in float32."""
    cos, sin = rotary
    first, second = at_least_float32(x_BHTC).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BHTC.dtype)
