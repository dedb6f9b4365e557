"""torchtitan: an optimizer container for its configuration, and checkpoints that later releases can load.

torchtitan saves each option of a param group under its own key and refuses a checkpoint that lacks one, so a release
with a new option could not resume from an older checkpoint. This container saves all options of a group as one line of
JSON; missing options come from the configuration.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.utils import get_flat_optim_state_dict
from torchtitan.tools.logging import logger

from muonsw.optimizer import ScaledDecayOptimizer
from muonsw.routing.groups import patterns_within
from muonsw.state import allocate
from muonsw.variants import SGDSW, AdamWSW, MuonSW

OPTIMIZERS: dict[str, type[ScaledDecayOptimizer]] = {"MuonSW": MuonSW, "AdamWSW": AdamWSW, "SGDSW": SGDSW}


class ScaledDecayOptimizers(OptimizersContainer):
    """One optimizer per model part, routed by role; `for_model` makes its configuration."""

    optimizers: list[ScaledDecayOptimizer]

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The arguments of `for_model`."""

        name: str = "MuonSW"
        """MuonSW, AdamWSW or SGDSW."""

        lr: float = 1e-3
        """The peak learning rate; torchtitan's schedulers multiply it by at most 1."""

        weight_decay: float = 0.1
        """Lambda of the decayed groups."""

        patterns: dict[str, dict[str, Any]] = field(default_factory=dict)
        """Options by parameter name or role, see `MuonSW.for_model`."""

        adamw: dict[str, Any] = field(default_factory=dict)
        """Options for all parameters routed to AdamW."""

        options: dict[str, Any] = field(default_factory=dict)
        """Options of the class, such as `decay`."""

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        if config.param_groups:
            raise ValueError("optimizer.param_groups: parameters are routed by role; use patterns instead")
        self.model_parts = model_parts
        patterns = [patterns_within(part, config.patterns) for part in model_parts]
        if unused := sorted(set(config.patterns).difference(*patterns)):
            message = f"patterns that match nothing in this rank's part of the model: {', '.join(unused)}"
            if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
                raise ValueError(message)
            logger.warning(message)  # another rank's pipeline stage may match them
        if config.name not in OPTIMIZERS:
            raise ValueError(f"optimizer.name={config.name!r}: must be one of {', '.join(OPTIMIZERS)}")
        self.optimizers = []
        options = {"lr": config.lr, "weight_decay": config.weight_decay, "adamw": config.adamw, **config.options}
        for part, used in zip(model_parts, patterns, strict=True):
            optimizer = OPTIMIZERS[config.name].for_model(part, patterns=used, **options)
            for group in optimizer.param_groups:  # the names that torchtitan's checkpoints use
                group["param_names"] = [canonical_fqn(name) for name in group["param_names"]]
            logger.info(f"Optimizer {config.name}:\n{optimizer.routing()}")
            self.optimizers.append(optimizer)
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        params = [param for group in groups for param in group["params"]]
        self._validate_params(params)
        self._post_init(params)

    def state_dict(self) -> dict[str, Any]:
        """Return a flat state dict, keyed by parameter name, for distributed checkpoints."""
        flat: dict[str, Any] = {}
        for optimizer in self.optimizers:
            allocate(optimizer)  # torchtitan's own way is a step at rate 0, which ours would count
            state = get_flat_optim_state_dict(optimizer)
            flat |= {key: value for key, value in state.items() if not key.startswith("param_groups.")}
            for group in optimizer.param_groups:
                options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                line = json.dumps(options, default=lambda tensor: tensor.squeeze().tolist())  # such as a rate
                flat |= {f"param_groups.{name}.options": line for name in group["param_names"]}
        return flat

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`, also from an earlier release or from other model parts."""
        for optimizer in self.optimizers:
            allocate(optimizer)
            state: dict[int, dict[str, Any]] = {}
            groups = []
            for group in optimizer.param_groups:
                names, first = group["param_names"], len(state)
                for number, (name, param) in enumerate(zip(names, group["params"], strict=True), start=first):
                    state[number] = {key: state_dict[f"state.{name}.{key}"] for key in optimizer.state[param]}
                saved = [json.loads(state_dict[f"param_groups.{name}.options"]) for name in names]
                # another division of the model may label groups differently
                saved = [{k: v for k, v in options.items() if k not in ("name", "role")} for options in saved]
                for name, options in zip(names, saved, strict=True):
                    if options != saved[0]:
                        keys = sorted(k for k in options.keys() | saved[0].keys() if options.get(k) != saved[0].get(k))
                        raise ValueError(f"{names[0]} and {name} were saved with different options: {', '.join(keys)}")
                groups.append({**saved[0], "params": list(range(first, len(state))), "param_names": names})
            optimizer.load_state_dict({"state": state, "param_groups": groups})


def for_model(
    lr: float,
    weight_decay: float = 0.1,
    *,
    optimizer: type[ScaledDecayOptimizer] = MuonSW,
    **options: Any,
) -> ScaledDecayOptimizers.Config:
    """Make the `optimizer=` of torchtitan's `Trainer.Config`: Muon-SW for the whole model.

    Args:
        lr: the peak learning rate.
        weight_decay: lambda of the decayed groups.
        optimizer: `MuonSW`, `AdamWSW` or `SGDSW`.
        **options: options of `MuonSW.for_model`, such as `decay`, `patterns` and `adamw`.
    """
    separate = {key: options.pop(key, None) or {} for key in ("patterns", "adamw")}
    return ScaledDecayOptimizers.Config(
        name=optimizer.__name__, lr=lr, weight_decay=weight_decay, options=options, **separate
    )
