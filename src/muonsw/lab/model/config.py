"""What a model is made of: one frozen dataclass, checked on creation, and the named sizes as data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

FF_MULTIPLE = 256
BALANCE_SCOPES = ("batch", "sequence")


def _require_positive(settings: object, names: tuple[str, ...], *, prefix: str = "", integers: int = 0) -> None:
    """Raise a `ValueError` unless the settings are positive and finite, and the first of them integers."""
    for number, name in enumerate(names):
        value = getattr(settings, name)
        if number < integers and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"{prefix}{name}={value} must be a whole number")
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{prefix}{name}={value} must be a positive, finite number")


@dataclass(frozen=True)
class MuP:
    """Constants of the maximal update parametrization at its base width (llm-optimizer-benchmark's values)."""

    enabled: bool = True  # whether they scale with the width; False is the standard parametrization
    base_width: int = 256  # width at which the constants below hold as they are
    init_std: float = 0.02  # standard deviation of every matrix, before the depth factor of residual projections
    embedding: float = 10.0  # the embedding's output is multiplied by it
    residual: float = 1.4  # a residual branch is multiplied by it over the square root of the number of layers

    def __post_init__(self) -> None:
        _require_positive(self, ("base_width", "init_std", "embedding", "residual"), prefix="mup.", integers=1)


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a decoder."""

    width: int  # size of the residual stream
    layers: int = 12  # blocks of attention and experts
    head_dim: int = 64  # size of an attention head; the width is a multiple of it
    experts: int = 8  # experts in each layer; one makes the model dense, without routers
    top_k: int = 2  # experts that each token is sent to
    ff: int | None = None  # inner size of an expert; None is 8/3 of the width, rounded up to a multiple of 256
    vocab: int = 50304  # tokens, padding included; embedding and head share one matrix
    sequence: int = 2048  # longest sequence
    rope_theta: float = 10000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    balance_coef: float = 0.1  # weight of the load-balance loss
    z_coef: float = 0.01  # weight of the router's z-loss
    # The load is balanced over the "batch" of one forward pass, as in the paper's codebase, or over each "sequence",
    # which does not depend on how a batch is cut into micro-batches.
    balance_over: str = "batch"
    mup: MuP = field(default_factory=MuP)  # constants of the parametrization

    def __post_init__(self) -> None:
        sizes: tuple[str, ...] = ("width", "layers", "head_dim", "experts", "top_k", "vocab", "sequence")
        sizes = sizes if self.ff is None else (*sizes, "ff")
        _require_positive(self, (*sizes, "rope_theta", "norm_eps"), integers=len(sizes))
        for name in ("balance_coef", "z_coef"):
            if not (math.isfinite(value := getattr(self, name)) and value >= 0):
                raise ValueError(f"{name}={value} must be finite and not negative; 0 switches this loss off")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even, because RoPE rotates pairs; try 64")
        if self.width % self.head_dim:
            fix = max(1, round(self.width / self.head_dim)) * self.head_dim
            raise ValueError(f"width={self.width} must be a multiple of head_dim={self.head_dim}; try width={fix}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} must not exceed experts={self.experts}; lower top_k or add experts")
        if self.balance_over not in BALANCE_SCOPES:
            raise ValueError(f"balance_over={self.balance_over!r} must be one of {', '.join(BALANCE_SCOPES)}")

    @property
    def heads(self) -> int:
        return self.width // self.head_dim

    @property
    def ff_width(self) -> int:
        """Inner size of an expert, given or derived."""
        return self.ff if self.ff is not None else -(-8 * self.width // (3 * FF_MULTIPLE)) * FF_MULTIPLE

    @property
    def relative_width(self) -> float:
        """Width over base width, by which muP scales; one in the standard parametrization."""
        return self.width / self.mup.base_width if self.mup.enabled else 1.0

    def dense(self) -> ModelConfig:
        """The same decoder with one expert, which every token uses, and no routers."""
        return replace(self, experts=1, top_k=1)


PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "w128": ModelConfig(width=128),
        "w256": ModelConfig(width=256),
        "w512": ModelConfig(width=512),
        "w768": ModelConfig(width=768),
        "w1024": ModelConfig(width=1024),
        # Minutes on one GPU.
        "mini": ModelConfig(width=256, layers=6, vocab=4096, sequence=1024),
        # Minutes on two CPU cores; 8/3 of the width is rounded up to a multiple of 16 only.
        "demo": ModelConfig(width=64, layers=4, head_dim=32, ff=176, vocab=1024, sequence=128),
    }
)


def preset(name: str) -> ModelConfig:
    """A named size; `NAME-dense` is its dense variant."""
    base = name.removesuffix("-dense")
    if base not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; choose from {', '.join(PRESETS)}, each also with -dense appended")
    return PRESETS[base] if base == name else PRESETS[base].dense()
