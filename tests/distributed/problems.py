"""The same parameters on many ranks and in one process, fed the same gradients."""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muonsw import ALGORITHMS, MuonSW
from tests.common.problems import cosine

PEAK, STEPS, CLOSE = 0.05, 4, 1e-9
DEFAULTS = {"lr": PEAK, "weight_decay": 0.5}

# Even and uneven shapes, fewer rows than ranks, a single row, stacks, convolutions, fused matrices.
GROUPS = {
    "matrices": ([(8, 8), (7, 5), (8, 8), (1, 6), (3, 9)], {}),
    "stack": ([(5, 4, 3), (4, 6, 4)], {"matrix": "stack"}),
    "convolution": ([(6, 2, 3, 3), (3, 5, 2)], {"matrix": "flatten"}),
    "fused": ([(12, 5), (12, 7)], {"split_sizes": (5, 3, 4)}),
    "fused_in": ([(5, 9)], {"split_sizes": (4, 5), "split_dim": 1}),
    "heads": ([(8, 6)], {"heads": 4}),
    "transposed": ([(6, 8), (3, 10)], {"transposed": True, "scale": "spectral", "split_sizes": None}),
    "vectors": ([(7,), (2, 3)], {"algorithm": "adamw", "weight_decay": 0.2}),
    "sgd": ([(9,)], {"algorithm": "sgd", "momentum": 0.9}),
    "lion": ([(9,), (3, 4)], {"algorithm": "lion"}),
}


def initial(shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return (0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def gradient(shape, step, number, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1009 * step + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def groups_of(chosen, make, dtype=torch.float64):
    """Return param groups; `make(value, options)` makes each parameter."""
    groups, number = [], 0
    for name in chosen:
        shapes, options = GROUPS[name]
        params = []
        for shape in shapes:
            params.append((f"{name}.{len(params)}", make(initial(shape, number, dtype), options)))
            number += 1
        groups.append({"params": params, **options})
    return groups


def build(chosen, make, dtype, options, **shared):
    """Build MuonSW on these groups; an algorithm in `options`, with its options, applies to groups of matrices."""
    algorithm_keys = {"algorithm", *ALGORITHMS[options["algorithm"]].defaults} if "algorithm" in options else set()
    common = {key: value for key, value in options.items() if key not in algorithm_keys}
    matrices = {key: value for key, value in options.items() if key in algorithm_keys}
    every = {key for entry in ALGORITHMS.values() for key in entry.defaults}
    groups = [{**matrices, **group} for group in groups_of(chosen, make, dtype)]
    for group in groups:
        for key in every - ALGORITHMS[group.get("algorithm", "muon")].defaults.keys():
            group.pop(key, None)
    return MuonSW(groups, **common, **shared)


def parameters(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def take_step(optimizer, step, give, absent=()):
    """Take one step of a schedule; `give(param, grad)` places gradients that depend only on step and position."""
    rate = cosine(PEAK, STEPS)(step)
    for group in optimizer.param_groups:
        group["lr"] = rate
    for number, param in enumerate(parameters(optimizer)):
        grad = gradient(param.shape, step, number, param.dtype)
        param.grad = None if number in absent else give(param, grad)
    optimizer.step()


def plain(value, options):
    del options
    return nn.Parameter(value.clone())


def sharded_over(mesh, placements):
    """Return a function that makes DTensors; `placements` may be a function of value and options."""

    def make(value, options):
        chosen = placements(value, options) if callable(placements) else placements
        return nn.Parameter(distribute_tensor(value.clone(), mesh, list(chosen), src_data_rank=None))

    return make


def give_sharded(param, grad):
    return distribute_tensor(grad, param.device_mesh, list(param.placements), src_data_rank=None)


def give_plain(param, grad):
    del param
    return grad


@cache
def mesh_of(*shape, names=None):
    """Return a mesh over the first ranks, or None on the other ranks.

    Cached, because each process group keeps a thread that polls a hundred times a second.
    """
    count = torch.tensor(shape).prod().item()
    mesh = DeviceMesh("cpu", torch.arange(count).view(shape), mesh_dim_names=names)
    return mesh if dist.get_rank() < count else None


@cache
def group_of(ranks):
    """Return a process group of the first ranks, or None on the other ranks."""
    group = dist.new_group(list(range(ranks)))
    return group if dist.get_rank() < ranks else None


def worst(left, right):
    """Return the largest difference between parameters, relative to the largest weight of each.

    For shards, only those of this rank: nothing is sent.
    """
    expected = right if isinstance(right, list) else whole(right)
    differences = []
    for param, reference in zip(parameters(left), expected, strict=True):
        mine, here = param.detach(), reference
        if isinstance(mine, DTensor):
            mine, here = mine.to_local(), give_sharded(mine, reference).to_local()
        differences += [((mine - here).abs().max() / reference.abs().max()).item()] if here.numel() else []
    return max(differences, default=0.0)


def far(answers):
    """Return the cases in which some rank differs by more than float64 rounding."""
    return {name: value for answer in answers for name, value in answer.items() if not value < CLOSE}


def whole(optimizer):
    """Return all parameters as full tensors."""
    return [p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in parameters(optimizer)]


ONE_PROCESS = {}


def trained_alone(chosen, steps, absent, dtype, options):
    """Train in one process and return the parameters; cached for the next case."""
    key = repr((chosen, steps, absent, dtype, options))
    if key not in ONE_PROCESS:
        alone = build(chosen, plain, dtype, options)
        for step in range(steps):
            take_step(alone, step, give_plain, absent)
        ONE_PROCESS[key] = whole(alone)
    return ONE_PROCESS[key]


def compared_with_one_process(
    together, give, options, chosen=tuple(GROUPS), steps=STEPS, absent=(), dtype=torch.float64
):
    """Train `together`; return the largest difference from training in one process."""
    for step in range(steps):
        take_step(together, step, give, absent)
    return worst(together, trained_alone(chosen, steps, absent, dtype, options))


def compare(mesh, placements, chosen=tuple(GROUPS), steps=STEPS, absent=(), dtype=torch.float64, **options):
    """Train the same parameters in one process and sharded over a mesh; return the largest difference."""
    options = {**DEFAULTS, **options}
    together = build(chosen, sharded_over(mesh, placements), dtype, options)
    return compared_with_one_process(together, give_sharded, options, chosen, steps, absent, dtype)


def shard0(value, options):
    del value, options
    return [Shard(0)]
