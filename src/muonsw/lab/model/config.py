"""The settings of a model, presets, and muP as one table by role."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import nn

from muonsw.lab.config import LAST_WITH_RETIRED, require

FF_MULTIPLE = 256


@dataclass(frozen=True)
class MuP:
    """Constants of the maximal update parametrization (values of llm-optimizer-benchmark)."""

    enabled: bool = True  # False is the standard parametrization
    base_width: int = 256  # width at which nothing is rescaled
    init_std: float = 0.02  # standard deviation of every matrix, before the depth factor of residual projections
    embedding: float = 10.0  # multiplier of the embedding's output
    residual: float = 1.4  # multiplier of a residual branch, divided by the square root of the number of layers

    def __post_init__(self) -> None:
        for name in ("base_width", "init_std", "embedding", "residual"):
            require(0 < getattr(self, name) < math.inf, f"mup.{name}", getattr(self, name), "positive and finite")


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder."""

    RETIRED: ClassVar[Mapping[str, Any]] = {"balance_over": "batch"}
    width: int  # of the residual stream
    layers: int = 12  # blocks of attention and experts
    head_dim: int = 64  # must divide the width
    experts: int = 8  # per layer
    top_k: int = 2  # experts per token
    ff: int | None = None  # inner size of an expert; None is 8/3 of the width, rounded up to a multiple of 256
    vocab: int = 50304  # tokens, padding included; embedding and head share one matrix
    sequence: int = 2048  # longest sequence
    rope_theta: float = 10000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    balance_coef: float = 0.1  # weight of the load-balance loss, over the batch of a forward pass
    z_coef: float = 0.01  # weight of the router's z-loss
    mup: MuP = field(default_factory=MuP)

    def __post_init__(self) -> None:
        for name in ("width", "layers", "head_dim", "experts", "top_k", "vocab", "sequence", "rope_theta", "norm_eps"):
            require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "positive and finite")
        require(self.ff_width > 0, "ff", self.ff, "positive")
        for name in ("balance_coef", "z_coef"):
            value = getattr(self, name)
            require(0 <= value < math.inf, name, value, "finite and not negative; 0 switches this loss off")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, because RoPE rotates pairs; try 64")
        if self.width % self.head_dim:
            fix = max(1, round(self.width / self.head_dim)) * self.head_dim
            raise ValueError(f"width={self.width} must be a multiple of head_dim={self.head_dim}; try width={fix}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} must not exceed experts={self.experts}; lower top_k or add experts")
        if self.experts == 1:
            old = f"dense models need an older muonsw, commit {LAST_WITH_RETIRED}"
            raise ValueError(f"experts={self.experts} must be at least 2; {old}")

    @property
    def ff_width(self) -> int:
        return self.ff if self.ff is not None else -(-8 * self.width // (3 * FF_MULTIPLE)) * FF_MULTIPLE

    @property
    def relative_width(self) -> float:
        """Width over muP's base width; 1 in the standard parametrization."""
        return self.width / self.mup.base_width if self.mup.enabled else 1.0


PRESETS: Mapping[str, ModelConfig] = {
    **{f"w{width}": ModelConfig(width=width) for width in (128, 256, 512, 768, 1024)},
    # Trains in minutes on one GPU.
    "mini": ModelConfig(width=256, layers=6, vocab=4096, sequence=1024),
    # Trains in minutes on two CPU cores; `ff` is 8/3 of the width, rounded up to a multiple of 16.
    "demo": ModelConfig(width=64, layers=4, head_dim=32, ff=176, vocab=1024, sequence=128),
}


def preset(name: str) -> ModelConfig:
    """The preset with this name."""
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; choose from {', '.join(PRESETS)}")
    return PRESETS[name]


@dataclass(frozen=True)
class Scaling:
    """MuP's constants for one role at one width."""

    std: float | None  # standard deviation at initialization; None: the weights start at one
    multiplier: float  # of the layer's output
    lr: float  # multiplier of the base learning rate with Adam


# The first matching pattern decides the role; a parameter without a match is an error.
ROLE_PATTERNS: Mapping[str, str] = {
    "embedding.weight": "embedding",
    "*norm.weight": "norm",
    "*.router.weight": "router",
    "*.attention.qkv.weight": "hidden",
    "*.attention.out.weight": "residual",
    "*.gate_up": "hidden",
    "*.down": "residual",
}

# The Muon learning rate of hidden matrices scales with this power of the relative width. With the shape scale
# 0.2*sqrt(max(m, n)), the spectral norm of an update falls with the width for "adam" (the paper's rule), stays constant
# for "sqrt", and grows for "none".
MUON_LR_POWERS: Mapping[str, float] = {"adam": -1.0, "sqrt": -0.5, "none": 0.0}


def scalings(config: ModelConfig) -> dict[str, Scaling]:
    """MuP's table by role.

    `residual` projections end a residual branch; `head` is the embedding matrix used as the output layer, with the
    initialization and learning rate of the embedding.
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
    """Muon's learning-rate multiplier for hidden and expert matrices."""
    return float(config.relative_width ** MUON_LR_POWERS[rule])


def role_of(name: str) -> str:
    for pattern, role in ROLE_PATTERNS.items():
        if fnmatchcase(name, pattern):
            return role
    raise ValueError(f"no muP role for parameter {name!r}; add a pattern for it to ROLE_PATTERNS")


def enters_norm(name: str) -> bool:
    """Whether the matrix with this name writes to the residual stream, whose readers all normalize it."""
    return any(role == "residual" and fnmatchcase(name, pattern) for pattern, role in ROLE_PATTERNS.items())


@torch.no_grad()
def initialize(model: nn.Module, config: ModelConfig, seed: int = 0) -> None:
    """Initialize every parameter; the same seed gives the same bits on every device."""
    generator = torch.Generator().manual_seed(seed)  # on the CPU
    table = scalings(config)
    for name, param in model.named_parameters():
        std = table[role_of(name)].std
        if std is None:
            param.fill_(1.0)
        else:
            param.copy_(torch.empty(param.shape, dtype=torch.float32).normal_(0.0, std, generator=generator))
