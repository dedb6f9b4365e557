"""timm: layer decay, the learning rate that shrinks towards the input, on top of routing by role."""

from __future__ import annotations

from typing import Any

import torch

from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.routing import Routing, route


def layer_decay(
    optimizer: type[ScaledDecayOptimizer],
    model: torch.nn.Module,
    lr: float,
    weight_decay: float = 0.1,
    *,
    layer_decay: float = 0.75,
    patterns: dict[str, dict[str, Any]] | None = None,
    adamw: dict[str, Any] | None = None,
    **options: Any,
) -> ScaledDecayOptimizer:
    """An optimizer whose groups carry timm's `lr_scale`, which timm's schedulers multiply into the rate.

    Roles and algorithms are those of `for_model`; depths are those of timm's `param_groups_layer_decay`. What the model
    lists in `no_weight_decay()` is not decayed. Use a scheduler of timm: torch's do not know `lr_scale`.

    Args:
        optimizer: `MuonSW`, `AdamWSW` or `SGDSW`.
        model: a model of timm, or any that has its `group_matcher`.
        lr: the peak of the learning rate, of the layers next to the output.
        weight_decay: lambda of the decayed groups.
        layer_decay: by how much the rate shrinks from one layer to the one before it.
        patterns: options by parameter name or role, see `MuonSW.for_model`.
        adamw: options for everything that is routed to AdamW.
        **options: options of the class, such as `decay` and `nonfinite`.
    """
    from timm.optim import param_groups_layer_decay

    model = _unwrapped(model)
    spared = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()  # type: ignore[operator]
    theirs = param_groups_layer_decay(
        model, weight_decay=weight_decay, no_weight_decay_list=tuple(spared), layer_decay=layer_decay
    )
    scales = {id(param): group["lr_scale"] for group in theirs for param in group["params"]}
    routing = route(model, optimizer.algorithm, patterns=patterns or {}, adamw=adamw or {})
    groups = [part for group in routing.groups for part in _by_depth(group, scales, spared)]
    return optimizer._routed(model, Routing(groups, routing.reasons), lr=lr, weight_decay=weight_decay, **options)


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model itself: timm tells depths by names, which compiling and DistributedDataParallel put a word before."""
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), torch.nn.Module):
        model = inner
    return model


def _by_depth(group: dict[str, Any], scales: dict[int, float], spared: set[str]) -> list[dict[str, Any]]:
    """A routed group as one group for each scale, the layers next to the output first."""
    parts: dict[tuple[float, bool], list[tuple[str, torch.Tensor]]] = {}
    for name, param in group["params"]:
        parts.setdefault((scales[id(param)], name in spared), []).append((name, param))
    return [
        {
            **group,
            "params": members,
            "lr_scale": scale,
            "name": f"{group['name']} x{scale:.3g}" + (" undecayed" if undecayed else ""),
            **({"weight_decay": 0.0} if undecayed else {}),
        }
        for (scale, undecayed), members in sorted(parts.items(), reverse=True)
    ]
