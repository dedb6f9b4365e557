"""Exact parameter counts and FLOPs of a model that is never allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from muonsw.lab.model.config import ModelConfig
from muonsw.lab.model.decoder import Decoder
from muonsw.lab.model.moe import MoE


@dataclass(frozen=True)
class Counts:
    """Sizes of a model.

    Attributes:
        total: Parameters; the tied matrix counts once.
        active: Parameters that one token uses: all but the experts it is not sent to.
        attention_flops: FLOPs a token of causal attention, forward and backward, at the longest sequence.
    """

    total: int
    active: int
    attention_flops: int

    @property
    def flops_per_token(self) -> int:
        """FLOPs of training on one token: six for each active parameter, and attention's."""
        return 6 * self.active + self.attention_flops


def count(config: ModelConfig) -> Counts:
    """Count on the meta device, from the modules that would be trained.

    Examples:
        >>> count(ModelConfig(width=256)).total
        72677632
    """
    with torch.device("meta"):
        model = Decoder(config, seed=None)
    total = sum(param.numel() for param in model.parameters())
    idle = config.experts - config.top_k
    resting = sum(
        idle * stack[0].numel()
        for module in model.modules()
        if isinstance(module, MoE)
        for stack in (module.gate_up, module.down)
    )
    # Scores and mixing are 2*2*T*D each layer for a full square, half of it causal, three times with the backward.
    attention = 6 * config.layers * config.width * config.sequence
    return Counts(total, total - resting, attention)
