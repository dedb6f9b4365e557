"""Parameters, FLOPs, memory and orthogonalizer work of a decoder that is never allocated."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from muonsw.lab.model.config import ModelConfig
from muonsw.lab.model.decoder import Decoder
from muonsw.lab.model.init import role_of
from muonsw.lab.model.loss import chunk_tokens
from muonsw.lab.model.moe import MoE

FLOAT32, BFLOAT16 = 4, 2
NEWTON_SCHULZ_STEPS = 5
# Roles in the muP table whose parameters Muon moves.
MUON_ROLES = ("hidden", "residual")


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
    """Count on the meta device, from the modules that would be trained.

    Examples:
        >>> count(ModelConfig(width=256)).total
        72677632
    """
    model = unallocated(config)
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
    return ModelSize(total, total - resting, attention)


@dataclass(frozen=True)
class Memory:
    """Bytes on one device that holds the whole model."""

    weights: int  # float32
    gradients: int  # float32
    muon_state: int  # one float32 momentum for each entry of hidden and expert matrices
    adamw_state: int  # two float32 averages for every other entry
    adamw_only_state: int  # what AdamW for all parameters would keep instead of both
    activations: int  # an estimate of what a micro-batch keeps for its backward pass, see `activation_bytes`

    @property
    def total(self) -> int:
        """With Muon."""
        return self.weights + self.gradients + self.muon_state + self.adamw_state + self.activations


def estimate_memory(config: ModelConfig, micro_batch: int) -> Memory:
    """What training with Muon holds in bfloat16 autocast over float32 weights.

    Examples:
        >>> estimate_memory(ModelConfig(width=256), micro_batch=1).weights == 4 * 72_677_632
        True
    """
    shapes = dict(parameter_shapes(config))
    total = sum(map(math.prod, shapes.values()))
    muon = sum(math.prod(shape) for name, shape in shapes.items() if role_of(name) in MUON_ROLES)
    return Memory(
        weights=FLOAT32 * total,
        gradients=FLOAT32 * total,
        muon_state=FLOAT32 * muon,
        adamw_state=2 * FLOAT32 * (total - muon),
        adamw_only_state=2 * FLOAT32 * total,
        activations=activation_bytes(config, micro_batch) + BFLOAT16 * total,
    )


def activation_bytes(config: ModelConfig, sequences: int) -> int:
    """Estimated bytes that one forward pass keeps for its backward in bfloat16 autocast, copies of weights apart.

    A layer keeps 36 bytes a token for each unit of the width (norms and the stream in float32, attention in bfloat16),
    and for each expert of a token 4 for each unit of the width and 8 for each of the expert's; the coefficients count
    the tensors that autograd saves. The loss holds the bfloat16 logits of one chunk. Fragmentation, temporaries of the
    backward pass and what a compiler recomputes are not in it.

    Examples:
        >>> activation_bytes(ModelConfig(width=256), 1) < activation_bytes(ModelConfig(width=512), 1)
        True
    """
    tokens, width = sequences * config.sequence, config.width
    layer = 36 * width + config.top_k * (4 * width + 8 * config.ff_width)
    logits = BFLOAT16 * min(tokens, chunk_tokens(config.vocab, BFLOAT16)) * config.vocab
    return tokens * (config.layers * layer + 12 * width) + logits


def orthogonalizer_flops(config: ModelConfig) -> float:
    """FLOPs that Newton-Schulz takes in one update: three products in each of its steps, for every matrix by itself.

    Examples:
        >>> seven_squares = ModelConfig(width=64, layers=1, experts=1, top_k=1, ff=64)
        >>> orthogonalizer_flops(seven_squares) / (5 * 6 * 64**3)
        7.0
    """
    return float(
        sum(
            NEWTON_SCHULZ_STEPS * (4 * min(m, n) ** 2 * max(m, n) + 2 * min(m, n) ** 3)
            for m, n in muon_matrices(config)
        )
    )


def muon_matrices(config: ModelConfig) -> Iterator[tuple[int, int]]:
    """Rows and columns of every matrix that Muon orthogonalizes, experts and fused projections one by one."""
    fused = unallocated(config).fused_projections()
    for name, shape in parameter_shapes(config):
        if role_of(name) not in MUON_ROLES:
            continue
        *stack, rows, columns = shape
        sizes = next((sizes for pattern, sizes in fused.items() if fnmatchcase(name, pattern)), (rows,))
        for _ in range(math.prod(stack)):
            yield from ((size, columns) for size in sizes)


def parameter_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each parameter, from the modules that would be trained."""
    yield from ((name, tuple(param.shape)) for name, param in unallocated(config).named_parameters())


def unallocated(config: ModelConfig) -> Decoder:
    """The decoder on the meta device, where tensors have shapes and no memory."""
    with torch.device("meta"):
        return Decoder(config, seed=None)
