"""A decoder on several ranks: replicated by DistributedDataParallel, or divided by `fully_shard`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muonsw.lab.errors import UsageError
from muonsw.lab.model import Decoder, Losses
from muonsw.lab.model.moe import MoE
from muonsw.lab.train.config import RunConfig
from muonsw.lab.train.world import World


class LocalModel:
    """A model on one process: its own forward pass, and nothing to synchronise."""

    # The ranks among which Muon's matrices are divided; sharded weights say themselves where they lie.
    process_group: dist.ProcessGroup | None = None
    # Whether sums take another order after the first backward pass.
    settles = False

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.forward: Callable[..., Losses] = model

    def backward_pass(self, *, last: bool) -> AbstractContextManager[object]:
        """Around the passes of a micro-batch: ranks add up their gradients at the last one of an update."""
        del last
        return nullcontext()


# The only buffer is a table that never changes. torch 2.13 has renamed the setting.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
_BUFFERS_STAY: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


class ReplicatedModel(LocalModel):
    """The whole model on every rank; gradients are averaged while the last backward pass is still going on."""

    settles = True  # it puts gradients together in the order in which the first pass made them

    def __init__(self, model: Decoder) -> None:
        super().__init__(model)
        self._ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **_BUFFERS_STAY)
        self.forward = self._ddp
        self.process_group = dist.group.WORLD

    def backward_pass(self, *, last: bool) -> AbstractContextManager[object]:
        """Gradients stay on their rank until the last micro-batch."""
        return nullcontext() if last else cast("AbstractContextManager[object]", self._ddp.no_sync())


class ShardedModel(LocalModel):
    """Weights, gradients and state divided over ranks, layer by layer; a layer is whole only while it computes."""

    def __init__(self, model: Decoder, config: RunConfig, world: World, device: torch.device) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        replicas = config.parallel.replicas
        axes = {"replicas": replicas, "shards": world.size // replicas} if replicas > 1 else {"shards": world.size}
        mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        place = _rows_of_experts(model) if config.parallel.experts == "rows" else None
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, shard_placement_fn=place)
        fully_shard(model, mesh=mesh, shard_placement_fn=place)
        super().__init__(model)

    def backward_pass(self, *, last: bool) -> AbstractContextManager[object]:
        """Gradients stay on their rank until the last micro-batch."""
        cast("Any", self.model).set_requires_gradient_sync(last)
        return nullcontext()


def place_model(model: Decoder, config: RunConfig, world: World, device: torch.device) -> LocalModel:
    """Put a model on all ranks, as the settings say."""
    if world.alone:
        return LocalModel(model)
    if model.config.balance_over == "batch":
        _average_loads(model, world.size)
    if config.parallel.strategy == "ddp":
        return ReplicatedModel(model)
    return ShardedModel(model, config, world, device)


def _average_loads(model: Decoder, ranks: int) -> None:
    """Let routers balance the load over the micro-batch of all ranks, as one rank would."""

    def mean(share: Tensor) -> Tensor:
        dist.all_reduce(share)
        return share / ranks

    for module in model.modules():
        if isinstance(module, MoE):
            module.over_ranks = mean


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
    if config.parallel.experts == "rows" and (model.width % shards or 2 * model.ff_width % shards):
        sizes = f"model.width={model.width} and twice ff={model.ff_width}"
        raise UsageError(f"{sizes} do not split into {shards} equal parts: set parallel.experts to 'stack'")


def _rows_of_experts(model: Decoder) -> Callable[[nn.Parameter], Any]:
    from torch.distributed.tensor import Shard

    experts = {id(param) for param in model.parameters() if param.dim() == 3}
    return lambda param: Shard(1) if id(param) in experts else None
