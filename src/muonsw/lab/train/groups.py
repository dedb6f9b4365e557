"""The optimizer of a run: the algorithm and learning rate of every parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from muonsw import AdamWSW, MuonSW
from muonsw.algorithms import ALGORITHMS
from muonsw.algorithms.adamw import ADAMW
from muonsw.decay import DECAY_RULES, decay_factors, decays
from muonsw.lab.model import Decoder, muon_lr_multiplier, role_of, scalings
from muonsw.lab.train.config import MUON_SETTINGS, OptimizerConfig
from muonsw.peak import eta_max
from muonsw.presets import PRESETS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Options = dict[str, Any]


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    steps: int | None = None,
    process_group: ProcessGroup | None = None,
    patterns: Mapping[str, Options] | None = None,
) -> MuonSW | AdamWSW:
    """One optimizer for a whole model, routed by role; a decoder's learning rates are multiplied as muP says.

    The model is already sharded, if it is to be; `process_group` are ranks that hold the same whole model, among which
    Muon's matrices are divided. `steps` is the length of the run, for decay rules that end with it, and `patterns` the
    routing of a task.

    Examples:
        >>> from muonsw.lab.model import ModelConfig
        >>> model = Decoder(ModelConfig(width=64, layers=1, head_dim=32, vocab=64, sequence=8))
        >>> optimizer = build_optimizer(model, OptimizerConfig(lr=0.01, muon_lr="sqrt"))
        >>> sorted({(g["role"], g["algorithm"], g["lr"]) for g in optimizer.param_groups})[:2]
        [('embedding', 'adamw', 0.01), ('experts', 'muon', 0.02)]
    """
    shared: Options = {name: getattr(config, name) for name in ("decay", "peak", "norm", "target_norm")}
    shared |= {"total_steps": steps}
    own = model if isinstance(model, Decoder) else None
    chosen = {name: _options(own, name, config) for name, _ in own.named_parameters()} if own else {}
    chosen |= patterns or {}
    if config.algorithm == "adamw":
        return AdamWSW.for_model(
            model, lr=config.lr, weight_decay=config.weight_decay, betas=config.betas, patterns=chosen, **shared
        )
    # Only what AdamW does not get anyway: a model of matrices alone would refuse it.
    adamw: Options = {} if config.betas == ADAMW.defaults["betas"] else {"betas": config.betas}
    adamw |= {} if config.adam_lr is None else {"lr": config.adam_lr}
    directions: Options = {"ns_dtype": config.ns_dtype}  # of products where the algorithm has products to choose
    if config.preset:
        algorithm = ALGORITHMS[PRESETS[config.preset]["algorithm"]]
        directions = {"preset": config.preset, **(directions if "ns_dtype" in algorithm.defaults else {})}
    else:
        directions |= {name: getattr(config, name) for name in MUON_SETTINGS}
    return MuonSW.for_model(
        model,
        lr=config.lr,
        weight_decay=config.weight_decay,
        **directions,
        adamw=adamw,
        patterns=chosen,
        process_group=process_group,
        **shared,
    )


def require_decay_below_one(optimizer: torch.optim.Optimizer, multiple: Callable[[int], float], steps: int) -> None:
    """Raise a `ValueError` if one step of this schedule would decay more than the whole weight."""
    for group in optimizer.param_groups:
        rule, lr, lam = group["decay"], float(group["initial_lr"]), float(group["weight_decay"])
        if DECAY_RULES[rule].uses_gradient or not decays(group):
            continue  # the step itself refuses too much
        # Rules that do not count steps take most at the peak.
        rates = [lr * multiple(step) for step in range(steps)] if DECAY_RULES[rule].uses_step else [lr]
        peak = eta_max({**group, "resolved_peak_lr": lr}) or 0.0
        phi = max(decay_factors(rule, lam, rates, peak))
        if phi > 1:
            size = f"a peak learning rate of {lr:g} with weight_decay={lam:g} (decay {rule!r})"
            fix = "lower optimizer.lr or optimizer.weight_decay"
            raise ValueError(f"{size} would take {phi:g} times the weight in one step: {fix}")


def _options(model: Decoder, name: str, config: OptimizerConfig) -> Options:
    """Options of one parameter that its role does not decide."""
    role, matrices = role_of(name), ALGORITHMS[config.matrix_algorithm].matrices
    rule = {"decay": config.unnormalized} if role == "hidden" and config.unnormalized else {}
    if config.algorithm == "adamw":
        return {"lr_multiplier": scalings(model.config)[role].lr, **rule}
    if role in ("hidden", "residual"):
        options: Options = {"lr_multiplier": muon_lr_multiplier(model.config, config.muon_lr), **rule}
        # The projections that a fused matrix holds; queries, keys and values may count as one.
        fused = model.fused_projections().items()
        sizes = [sizes for pattern, sizes in fused if name.endswith(pattern.lstrip("*"))]
        if sizes and matrices and not (name.endswith("qkv.weight") and config.qkv == "fused"):
            options["split_sizes"] = sizes[0]
        return options
    if role == "router" and config.router == "muon":
        return {"algorithm": config.matrix_algorithm, "weight_decay": config.weight_decay}
    # A rule without matrices, as Lion's, would take the rest too: members differ in the same matrices.
    return {} if matrices else {"algorithm": "adamw"}
