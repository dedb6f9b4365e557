"""What a model is made of, and the FLOPs and tokens of runs; tests hold sizes to what tensors take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import NamedTuple

from muonsw.algorithms import ALGORITHMS
from muonsw.lab.model import ModelConfig, count, role_of, unallocated
from muonsw.lab.train.config import RunConfig

STEPS = 5  # of Newton-Schulz
# Roles in the muP table whose parameters Muon moves.
MUON_ROLES = ("hidden", "residual")


class ModelPart(NamedTuple):
    """Parameters that are moved in one way."""

    parameters: int
    stack: int  # how many matrices lie on each other in one tensor; 1 for plain matrices
    matrices: Mapping[tuple[int, int], int]  # those that Muon orthogonalizes, by short and long side; none for AdamW's


class ModelParts(NamedTuple):
    """A model, divided by what the optimizer and ranks do with it."""

    experts: ModelPart  # stacks of experts
    hidden: ModelPart  # other matrices of Muon
    rest: ModelPart  # what AdamW moves

    @property
    def muon(self) -> int:
        """Parameters that Muon moves."""
        return self.experts.parameters + self.hidden.parameters


@cache
def parts_of(config: ModelConfig) -> ModelParts:
    """Divide the modules that would be trained; fused projections count one by one.

    Examples:
        >>> parts = parts_of(ModelConfig(width=256))
        >>> parts.experts.parameters, sum(parts.experts.matrices.values()), parts.hidden.matrices
        (56623104, 288, {(256, 256): 48})
    """
    model = unallocated(config)
    fused, sizes = model.fused_projections(), Counter[str]()
    matrices: dict[str, Counter[tuple[int, int]]] = {"experts": Counter(), "hidden": Counter()}
    for name, param in model.named_parameters():
        if role_of(name) not in MUON_ROLES:
            sizes["rest"] += param.numel()
            continue
        part = "experts" if param.dim() == 3 and config.experts > 1 else "hidden"
        sizes[part] += param.numel()
        *stack, rows, columns = param.shape
        for size in next((sizes for pattern, sizes in fused.items() if fnmatchcase(name, pattern)), (rows,)):
            matrices[part][min(size, columns), max(size, columns)] += math.prod(stack)
    return ModelParts(
        ModelPart(sizes["experts"], config.experts, dict(matrices["experts"])),
        ModelPart(sizes["hidden"], 1, dict(matrices["hidden"])),
        ModelPart(sizes["rest"], 1, {}),
    )


def newton_schulz_flops(short: int, long: int) -> int:
    """FLOPs that Newton-Schulz takes for one matrix: three products in each of its steps."""
    return STEPS * (4 * short**2 * long + 2 * short**3)


def orthogonalizer_flops(config: ModelConfig) -> float:
    """FLOPs that Newton-Schulz takes in one update, every matrix by itself.

    Examples:
        >>> seven_squares = ModelConfig(width=64, layers=1, experts=1, top_k=1, ff=64)
        >>> orthogonalizer_flops(seven_squares) / (5 * 6 * 64**3)
        7.0
    """
    pairs = (pair for part in parts_of(config) for pair in part.matrices.items())
    return float(sum(number * newton_schulz_flops(*shape) for shape, number in pairs))


@dataclass(frozen=True)
class Cost:
    """Runs and what they take."""

    runs: int
    tokens: int  # trained on
    flops: float  # training, Newton-Schulz and evaluation together

    def hours(self, tflops: float, workers: int) -> float:
        """At a sustained rate for each run, with so many runs at a time."""
        return self.flops / (tflops * 1e12) / 3600.0 / max(1, min(workers, self.runs))


def cost(configs: Iterable[RunConfig]) -> Cost:
    """Of runs, equal ones counted once."""
    distinct = list(dict.fromkeys(configs))
    tokens = sum(config.steps * config.tokens_per_step for config in distinct)
    return Cost(len(distinct), tokens, math.fsum(map(run_flops, distinct)))


def run_flops(config: RunConfig) -> float:
    """FLOPs of one run: three passes a trained token, one a validated token, and Newton-Schulz in every update.

    Examples:
        >>> from muonsw.lab.train.presets import preset_run
        >>> f"{run_flops(preset_run('w256', '')):.2g}"
        '4e+18'
    """
    each = flops_per_token(config.model)
    evaluations = 1 + math.ceil(config.steps / config.eval_every)
    validated = evaluations * (config.tokens.eval_windows or 0) * config.decoder.sequence
    muon = orthogonalizer_flops(config.decoder) if ALGORITHMS[config.optimizer.matrix_algorithm].matrices else 0.0
    return config.steps * (config.tokens_per_step * each + muon) + validated * each / 3.0


@cache
def flops_per_token(config: ModelConfig) -> int:
    """FLOPs of a trained token, forward and backward."""
    return count(config).flops_per_token
