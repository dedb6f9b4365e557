"""timm: `--opt muonsw` in its scripts, also with layer decay (learning rates that fall towards the input)."""

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
    cls: type[ScaledDecayOptimizer],
    registered: weakref.ref[torch.nn.Module],
    params: Iterable[Any],
    lr: float,
    weight_decay: float = 0.0,
    **options: Any,
) -> ScaledDecayOptimizer:
    """Build the optimizer for a registered model, with the decay and layer scales of timm's groups."""
    groups = [group for group in params if isinstance(group, dict)]
    scales = {id(param): float(group.get("lr_scale", 1.0)) for group in groups for param in group["params"]}
    model = registered()
    if model is None or scales.keys() != {id(p) for p in model.parameters() if p.requires_grad}:
        raise ValueError(
            "timm is building an optimizer for another model; call muonsw.integrations.timm.register(model) first"
        )
    weight_decay = max((group.get("weight_decay", 0.0) for group in groups), default=weight_decay)
    optimizer = cls.for_model(model, lr=lr, weight_decay=weight_decay, **options)
    if set(scales.values()) == {1.0}:
        return optimizer
    divided: list[dict[str, Any]] = []  # each group by scale, largest scale first
    for group in optimizer.param_groups:
        for scale in sorted({scales[id(param)] for param in group["params"]}, reverse=True):
            named = zip(group["param_names"], group["params"], strict=True)
            names, members = zip(*[(name, param) for name, param in named if scales[id(param)] == scale], strict=True)
            part = {**group, "params": list(members), "param_names": list(names), "lr_scale": scale}
            part["name"] = f"{group['name']} x{scale:.3g}"
            if isinstance(group["peak_lr"], float):
                part["peak_lr"] = group["peak_lr"] * scale
            divided.append(part)
    optimizer.param_groups[:] = divided  # there is no state yet
    return optimizer
