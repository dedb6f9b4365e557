"""A model on several ranks: replicated by DistributedDataParallel, or divided by `fully_shard`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from muonsw.lab.base.errors import UsageError
from muonsw.lab.tasks import LossParts
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.world import World


class LocalModel:
    """A module that computes a loss, on one process: its own forward pass, and nothing to synchronise."""

    # The ranks among which Muon's matrices are divided; sharded weights say themselves where they lie.
    process_group: dist.ProcessGroup | None = None
    # Whether sums take another order after the first backward pass.
    settles = False

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward: Callable[..., LossParts] = module

    def backward_pass(self, *, last: bool) -> AbstractContextManager[object]:
        """Around the passes of a micro-batch: ranks add up their gradients at the last one of an update."""
        del last
        return nullcontext()

    def share_buffers(self) -> None:
        """Give all ranks the buffers of the first, which batches of their own have changed."""


# torch 2.13 has renamed the setting.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers"


class ReplicatedModel(LocalModel):
    """The whole model on every rank; gradients are averaged while the last backward pass is still going on."""

    settles = True  # it puts gradients together in the order in which the first pass made them

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # Buffers that are not saved, such as a table of rotations, never change.
        self._buffers = saved_buffers(module)
        settings: dict[str, Any] = {_SYNC_BUFFERS: bool(self._buffers)}
        self._ddp = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True, **settings)
        self.forward = self._ddp
        self.process_group = dist.group.WORLD

    def backward_pass(self, *, last: bool) -> AbstractContextManager[object]:
        """Gradients stay on their rank until the last micro-batch."""
        return nullcontext() if last else cast("AbstractContextManager[object]", self._ddp.no_sync())

    def share_buffers(self) -> None:
        """Give all ranks the buffers of the first, as the next forward pass would."""
        for name in self._buffers:
            dist.broadcast(self.module.get_buffer(name), src=0)


class ShardedModel(LocalModel):
    """Weights, gradients and state divided over ranks, layer by layer; a layer is whole only while it computes."""

    def __init__(self, module: nn.Module, config: RunConfig, world: World, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        replicas = config.parallel.replicas
        axes = {"replicas": replicas, "shards": world.size // replicas} if replicas > 1 else {"shards": world.size}
        mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        place = _rows_of_experts(module) if config.parallel.experts == "rows" else None
        for layer in layers_of(module):
            fully_shard(layer, mesh=mesh, shard_placement_fn=place)
        fully_shard(module, mesh=mesh, shard_placement_fn=place)
        super().__init__(module)

    def backward_pass(self, *, last: bool) -> AbstractContextManager[object]:
        """Gradients stay on their rank until the last micro-batch."""
        cast("Any", self.module).set_requires_gradient_sync(last)
        return nullcontext()


def place_model(module: nn.Module, config: RunConfig, world: World, device: torch.device) -> LocalModel:
    """Put a module that computes a loss on all ranks, as the settings say.

    Raises:
        UsageError: If it has buffers that ranks would have to keep equal, and is to be divided.
    """
    if world.alone:
        return LocalModel(module)
    if config.parallel.strategy == "ddp":
        return ReplicatedModel(module)
    if buffers := saved_buffers(module):
        raise UsageError(f"{buffers[0]} is a buffer of each rank, so the model cannot be divided: use strategy ddp")
    return ShardedModel(module, config, world, device)


def saved_buffers(module: nn.Module) -> list[str]:
    """The buffers that a checkpoint holds, such as the statistics of a BatchNorm."""
    saved = module.state_dict(keep_vars=True)
    return [name for name, _ in module.named_buffers() if name in saved]


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
    """Find out whether a run can be divided over so many ranks.

    Raises:
        UsageError: If it cannot.
    """
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


def _rows_of_experts(model: nn.Module) -> Callable[[nn.Parameter], Any]:
    from torch.distributed.tensor import Shard

    experts = {id(param) for param in model.parameters() if param.dim() == 3}
    return lambda param: Shard(1) if id(param) in experts else None
