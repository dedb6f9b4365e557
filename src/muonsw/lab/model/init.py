"""muP as one table by role, and the one function that initialises every parameter from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from muonsw.lab.model.config import ModelConfig


@dataclass(frozen=True)
class Scaling:
    """What muP says about one role at one width."""

    std: float | None  # standard deviation at initialisation; None where the weights start at one
    multiplier: float  # what the output of the layer is multiplied by
    lr: float  # what the base learning rate is multiplied by under Adam


# The first pattern that matches names the role; a parameter that none matches is an error.
ROLE_PATTERNS: Mapping[str, str] = {
    "embedding.weight": "embedding",
    "*norm.weight": "norm",
    "*.router.weight": "router",
    "*.attention.qkv.weight": "hidden",
    "*.attention.out.weight": "residual",
    "*.gate_up": "hidden",
    "*.down": "residual",
}

# The Muon learning rate of hidden matrices goes as this power of the relative width. With the shape scale
# 0.2*sqrt(max(m, n)) the update's spectral norm shrinks with the width under "adam" (the paper's rule), is flat under
# "sqrt" and grows under "none".
MUON_LR_POWERS: Mapping[str, float] = {"adam": -1.0, "sqrt": -0.5, "none": 0.0}


def scalings(config: ModelConfig) -> dict[str, Scaling]:
    """The table: by role, initial standard deviation, output multiplier and Adam learning-rate multiplier.

    `residual` are the projections that end a residual branch; `head` is the tied use of the embedding matrix, whose
    initialisation and learning rate are those of the embedding.

    Examples:
        >>> scalings(ModelConfig(width=1024))["router"]
        Scaling(std=0.02, multiplier=0.25, lr=1.0)
        >>> scalings(ModelConfig(width=1024))["hidden"]
        Scaling(std=0.01, multiplier=1.0, lr=0.25)
    """
    m, std, depth = config.relative_width, config.mup.init_std, config.layers
    return {
        "embedding": Scaling(std, config.mup.embedding, 1.0),
        "head": Scaling(std, 1.0 / m, 1.0),
        "hidden": Scaling(std / math.sqrt(m), 1.0, 1.0 / m),
        "residual": Scaling(std / math.sqrt(2 * depth * m), config.mup.residual / math.sqrt(depth), 1.0 / m),
        "router": Scaling(std, 1.0 / m, 1.0),
        "norm": Scaling(None, 1.0, 1.0),
    }


def muon_lr_multiplier(config: ModelConfig, rule: str) -> float:
    """What the base learning rate of hidden and expert matrices is multiplied by under Muon."""
    if rule not in MUON_LR_POWERS:
        raise ValueError(f"unknown muP rule {rule!r} for Muon; choose from {', '.join(MUON_LR_POWERS)}")
    return float(config.relative_width ** MUON_LR_POWERS[rule])


def role_of(name: str) -> str:
    """Role of a parameter in the table."""
    for pattern, role in ROLE_PATTERNS.items():
        if fnmatchcase(name, pattern):
            return role
    raise ValueError(f"no muP role for parameter {name!r}; add a pattern for it to ROLE_PATTERNS")


def enters_norm(name: str) -> bool:
    """Whether a matrix of this name writes to the residual stream, so that only a normalization reads its output."""
    return any(role == "residual" and fnmatchcase(name, pattern) for pattern, role in ROLE_PATTERNS.items())


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int = 0) -> None:
    """Fill every parameter from the table; the same seed gives the same bits on every device.

    Numbers are drawn in float32 on the CPU, one parameter after another, and then copied.
    """
    generator = torch.Generator().manual_seed(seed)
    table = scalings(config)
    for name, param in model.named_parameters():
        std = table[role_of(name)].std
        if std is None:
            param.fill_(1.0)
        else:
            param.copy_(torch.empty(param.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))
