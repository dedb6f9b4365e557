"""A model on several ranks: replicated by DistributedDataParallel, or divided by `fully_shard`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from muonsw.lab.errors import UsageError
from muonsw.lab.tasks import LossParts
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.world import World

# torch 2.13 has renamed the setting.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers"


class PlacedModel:
    """A module that computes a loss: on one process, replicated by DDP, or sharded layer by layer by FSDP2."""

    def __init__(self, module: nn.Module, config: RunConfig, world: World, device: torch.device) -> None:
        self.module, self.forward = module, cast("Callable[..., LossParts]", module)
        self.strategy = "" if world.alone else config.parallel.strategy
        # The ranks among which Muon's matrices are divided; sharded weights know their ranks themselves.
        self.process_group = dist.group.WORLD if self.strategy == "ddp" else None
        # Buffers that are not saved, such as a table of rotations, never change; the statistics of a BatchNorm do.
        saved = module.state_dict(keep_vars=True)
        self._buffers = [name for name, _ in module.named_buffers() if name in saved]
        if self.strategy == "ddp":
            settings: dict[str, Any] = {_SYNC_BUFFERS: bool(self._buffers), "gradient_as_bucket_view": True}
            self.forward = nn.parallel.DistributedDataParallel(module, **settings)
        elif self.strategy == "fsdp":
            if self._buffers:
                buffer = f"{self._buffers[0]} is a buffer of each rank"
                raise UsageError(f"{buffer}, so the model cannot be divided: use strategy ddp")
            _shard(module, config, world, device)

    def backward_pass(self, *, last: bool) -> AbstractContextManager[object]:
        """Surround the passes of a micro-batch: gradients stay on their rank until the last one of an update."""
        if self.strategy == "fsdp":
            cast("Any", self.module).set_requires_gradient_sync(last)
        if self.strategy == "ddp" and not last:
            return cast("AbstractContextManager[object]", cast("Any", self.forward).no_sync())
        return nullcontext()

    def share_buffers(self) -> None:
        """Give all ranks the buffers of the first, as DDP's next forward pass would."""
        if self.strategy == "ddp":
            for name in self._buffers:
                dist.broadcast(self.module.get_buffer(name), src=0)


def _shard(module: nn.Module, config: RunConfig, world: World, device: torch.device) -> None:
    from torch.distributed.device_mesh import init_device_mesh  # slow to import
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    replicas = config.parallel.replicas
    axes = {"replicas": replicas, "shards": world.size // replicas} if replicas > 1 else {"shards": world.size}
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    # New groups do not take the timeout of the first one. torch 2.15 made the function public.
    set_timeout = getattr(dist, "set_timeout", None) or torch.distributed.distributed_c10d._set_pg_timeout
    for group in mesh.get_all_groups():
        set_timeout(timedelta(seconds=config.parallel.timeout), group)
    experts = {id(param) for param in module.parameters() if param.dim() == 3}
    rows = config.parallel.experts == "rows"

    def place(param: nn.Parameter) -> Any:
        return Shard(1) if rows and id(param) in experts else None

    for part in (*layers_of(module), module):
        fully_shard(part, mesh=mesh, shard_placement_fn=place)


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The parts of a model that are gathered one after the other: the members of its outermost lists of modules.

    Examples:
        >>> layers = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)]) for _ in range(3))
        >>> len(layers_of(nn.ModuleDict({"layers": layers, "head": nn.Linear(2, 2)})))
        3
    """
    if isinstance(module, nn.ModuleList):
        return [layer for layer in module if next(layer.parameters(), None) is not None]
    return [layer for child in module.children() for layer in layers_of(child)]


def require_division(config: RunConfig, ranks: int) -> None:
    """Raise a `UsageError` if a run cannot be divided over this number of ranks."""
    if config.batch % (ranks * config.accumulation):
        split = f"accumulation={config.accumulation} micro-batches on each of {ranks} ranks"
        raise UsageError(f"batch={config.batch} does not split into {split}: choose a multiple")
    if config.parallel.strategy != "fsdp" or ranks == 1:
        return
    replicas = config.parallel.replicas
    if ranks % replicas:
        raise UsageError(f"{ranks} ranks cannot hold parallel.replicas={replicas} equal copies: choose a divisor")
    shards, model = ranks // replicas, config.model
    if model and config.parallel.experts == "rows" and (model.width % shards or 2 * model.ff_width % shards):
        sizes = f"model.width={model.width} and twice ff={model.ff_width}"
        raise UsageError(f"{sizes} do not split into {shards} equal parts: set parallel.experts to 'stack'")
