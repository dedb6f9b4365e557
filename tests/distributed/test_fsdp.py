"""Models under FSDP2, HSDP and tensor parallelism, with accumulation and clipping."""

import copy
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from muonsw import MuonSW, clip_optimizer_grads_
from tests.distributed.problems import CLOSE, DEFAULTS, STEPS, mesh_of, parameters, worst
from tests.distributed.test_replicated import Model, batch, loss_of


def blocks(model):
    return [model.conv, model.first, model.second, model.sometimes, model.frozen, model]


def clip_by_torch(optimizer):
    torch.nn.utils.clip_grad_norm_([p for p in parameters(optimizer) if p.requires_grad], 0.5)


def clip_by_ours(optimizer):
    """Clip the whole model by one norm."""
    norm = clip_optimizer_grads_(optimizer, 0.5, algorithms=("adamw", "sgd", "muon"))
    assert not hasattr(norm, "device_mesh")
    return norm


def train(alone, together, steps=STEPS, shares=1, share=0, micro=2, clip=clip_by_torch, **options):
    """Train both models with two micro-batches a step and clipping; return the largest difference."""
    options = {**DEFAULTS, **options}
    optimizers = [MuonSW.for_model(model, **options) for model in (alone, together)]
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, STEPS) for o in optimizers]
    for step in range(steps):
        for half in range(micro):
            tokens = batch(step, half)
            (loss_of(alone, tokens, True) / micro).backward()
            (loss_of(together, tokens.chunk(shares)[share], True) / micro).backward()
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            clip(optimizer)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    summaries = [{**asdict(optimizer.summary()), "state": "of a rank"} for optimizer in optimizers]
    return worst(optimizers[1], optimizers[0]), summaries[0] == summaries[1]


def models():
    torch.manual_seed(1)
    alone = Model().double()
    return alone, copy.deepcopy(alone)


def fsdp(*mesh_shape, **options):
    mesh = mesh_of(*mesh_shape, names=("replicas", "shards")[-len(mesh_shape) :])
    if mesh is None:
        return 0.0, True
    alone, together = models()
    for block in blocks(together):
        fully_shard(block, mesh=mesh)
    if 4 % mesh.size():
        return train(alone, together, **options)  # every rank sees the whole batch
    return train(alone, together, shares=mesh.size(), share=dist.get_rank(), **options)


# shards of every norm rule are in test_sharded
@pytest.mark.parametrize(
    ("mesh_shape", "options"),
    [((3,), {}), ((4,), {}), ((2, 2), {}), ((2, 2), {"norm": "hyperball"}), ((2, 2), {"norm": "target"})],
    ids=str,
)
def test_fsdp_equals_one_process(pool, mesh_shape, options):
    for difference, same_summary in pool.run(fsdp, *mesh_shape, **options):
        assert difference < CLOSE
        assert same_summary


def tensor_parallel(*mesh_shape, **options):
    """Shard two layers over the last axis of a mesh; with two axes, all layers over the first by FSDP."""
    mesh = mesh_of(*mesh_shape, names=("dp", "tp")[-len(mesh_shape) :])
    if mesh is None:
        return 0.0, True
    alone, together = models()
    parallelize_module(together, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    if len(mesh_shape) == 1:
        return train(alone, together, clip=clip_by_ours, **options)
    for block in blocks(together):
        fully_shard(block, mesh=mesh["dp"])
    return train(alone, together, shares=mesh_shape[0], share=mesh.get_coordinate()[0], clip=clip_by_ours, **options)


@pytest.mark.parametrize(
    ("mesh_shape", "options"),
    [((2,), {}), ((3,), {}), ((2, 2), {}), ((2, 2), {"decay": "gradient_norm", "weight_decay": 0.02})],
    ids=str,
)
def test_tensor_parallelism_equals_one_process(pool, mesh_shape, options):
    """One norm covers plain parameters and those of several meshes, which torch's clipping refuses."""
    for difference, same_summary in pool.run(tensor_parallel, *mesh_shape, **options):
        assert difference < CLOSE
        assert same_summary or "decay" in options  # the norm of gradients differs by rounding
