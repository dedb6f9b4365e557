"""timm: `--opt muonsw` in its scripts, and layer decay (learning rates that fall towards the input) with routing."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.options import require_model
from muonsw.routing.facts import unwrapped
from muonsw.variants import SGDSW, AdamWSW, MuonSW

# Each optimizer by its name in timm, and the arguments it accepts. MuonSW has no `has_momentum`, because timm's default
# of 0.9 is not Muon's.
NAMES: dict[str, tuple[type[ScaledDecayOptimizer], dict[str, bool]]] = {
    "muonsw": (MuonSW, {"has_eps": False}),
    "adamwsw": (AdamWSW, {"has_betas": True}),
    "sgdsw": (SGDSW, {"has_eps": False, "has_momentum": True}),
}


def register(model: torch.nn.Module) -> None:
    """Make `muonsw`, `adamwsw` and `sgdsw` known to timm's `create_optimizer_v2(model, opt="muonsw")` and `--opt`.

    timm passes only parameters to an optimizer, and roles need the model, so call this once the model exists. Layer
    decay is timm's; weight decay follows roles.

    Args:
        model: the model that `create_optimizer_v2` will get, compiled or not.
    """
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry  # timm has no public way to reach it

    require_model(model, "register")
    for name, (optimizer, takes) in NAMES.items():
        build = partial(_from_timm, optimizer, weakref.ref(unwrapped(model)))
        text = f"{optimizer.__name__}.for_model: weight decay that follows the learning rate"
        default_registry.register(OptimInfo(name, build, text, **takes))


def _from_timm(
    optimizer: type[ScaledDecayOptimizer],
    model: weakref.ref[torch.nn.Module],
    params: Iterable[Any],
    lr: float,
    weight_decay: float = 0.0,
    **options: Any,
) -> ScaledDecayOptimizer:
    """Build the optimizer for a registered model, with the decay and layer scales of timm's groups."""
    groups = [group for group in params if isinstance(group, dict)]
    scales = {id(param): float(group.get("lr_scale", 1.0)) for group in groups for param in group["params"]}
    registered = model()
    if registered is None or scales.keys() != {id(p) for p in registered.parameters() if p.requires_grad}:
        raise ValueError(
            "timm is building an optimizer for another model; call muonsw.integrations.timm.register(model) first"
        )
    weight_decay = max((group.get("weight_decay", 0.0) for group in groups), default=weight_decay)
    return _built(optimizer, registered, scales, lr=lr, weight_decay=weight_decay, **options)


def layer_decay(
    optimizer: type[ScaledDecayOptimizer],
    model: torch.nn.Module,
    lr: float,
    weight_decay: float = 0.1,
    *,
    layer_decay: float = 0.75,
    **options: Any,
) -> ScaledDecayOptimizer:
    """Build an optimizer whose groups have timm's `lr_scale`, by which timm's schedulers multiply the rate.

    Roles and algorithms come from `for_model`, depths from timm's `param_groups_layer_decay`. Parameters listed by the
    model's `no_weight_decay()` are not decayed. Use timm's schedulers: torch's ignore `lr_scale`.

    Args:
        optimizer: `MuonSW`, `AdamWSW` or `SGDSW`.
        model: a timm model, or any with a `group_matcher`.
        lr: the peak learning rate of the layers next to the output.
        weight_decay: lambda of the decayed groups.
        layer_decay: the ratio of a layer's rate to that of the next layer.
        **options: options of `MuonSW.for_model`, such as `decay`, `patterns` and `adamw`.
    """
    from timm.optim import param_groups_layer_decay

    require_model(model, "layer_decay")
    model = unwrapped(model)  # timm reads depths from names, which wrappers change
    groups = param_groups_layer_decay(model, layer_decay=layer_decay)
    scales = {id(param): group["lr_scale"] for group in groups for param in group["params"]}
    return _built(optimizer, model, scales, lr=lr, weight_decay=weight_decay, **options)


def _built(
    cls: type[ScaledDecayOptimizer], model: torch.nn.Module, scales: dict[int, float], **options: Any
) -> ScaledDecayOptimizer:
    """Build the optimizer with `for_model`, and split its groups by scale, largest scale first."""
    optimizer = cls.for_model(model, **options)
    if set(scales.values()) == {1.0}:
        return optimizer
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parts: dict[float, list[tuple[str, torch.Tensor]]] = {}
        for name, param in zip(group["param_names"], group["params"], strict=True):
            parts.setdefault(scales[id(param)], []).append((name, param))
        for scale, members in sorted(parts.items(), reverse=True):
            names, params = map(list, zip(*members, strict=True))
            label = f"{group['name']} x{scale:.3g}"
            part = {**group, "params": params, "param_names": names, "lr_scale": scale, "name": label}
            if isinstance(group["peak_lr"], float):
                part["peak_lr"] = group["peak_lr"] * scale
            groups.append(part)
    optimizer.param_groups[:] = groups  # there is no state yet
    return optimizer
