"""Steps on sharded parameters equal steps in one process."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from muonsw import ALGORITHMS, DECAY_RULES, NORM_RULES, AdamWSW, MuonSW, ScheduleFree, clip_optimizer_grads_
from tests.common.problems import RULE_OPTIONS
from tests.distributed.pool import Pool
from tests.distributed.problems import (
    CLOSE,
    DEFAULTS,
    GROUPS,
    PEAK,
    compare,
    compared_with_one_process,
    far,
    give_plain,
    give_sharded,
    gradient,
    groups_of,
    initial,
    mesh_of,
    parameters,
    plain,
    shard0,
    sharded_over,
    take_step,
    worst,
)


def along(*axes):
    """Shard along these axes, one per mesh axis (None: replicate); tensors with fewer axes use their last."""

    def placements(value, options):
        del options
        return [Replicate() if axis is None else Shard(min(axis, value.dim() - 1)) for axis in axes]

    return placements


def sharded(mesh_shape, axes, **options):
    mesh = mesh_of(*mesh_shape)
    return compare(mesh, along(*axes), **options) if mesh is not None else 0.0


MESHES = [
    *(([ranks], (axis,)) for ranks in (1, 2, 3, 4) for axis in (0, 1)),
    *(([2, 2], axes) for axes in ((None, 0), (None, 1), (0, 1), (1, 0), (0, 0), (0, 2), (None, None))),
    ([2, 1], (None, None)),  # half of the world; no process group may need the other half
]


@pytest.mark.parametrize(("mesh", "axes"), MESHES, ids=str)
def test_a_sharded_step_equals_one_process(pool, mesh, axes):
    assert max(pool.run(sharded, mesh, axes)) < CLOSE


def part_of_the_world():
    """Train on meshes over four of five ranks, after some ranks made process groups of their own."""
    meshes = [DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([[0, 1], [2, 3]], [[4, 1], [0, 3]])]
    dist.new_group([0, 3])
    if dist.get_rank() == 1:
        dist.new_group([1], use_local_synchronization=True)
    straight, turned = [mesh if mesh.get_coordinate() is not None else None for mesh in meshes]
    with mock.patch.object(dist, "new_group", side_effect=AssertionError("a process group was made")):
        return [
            compare(mesh, along(*axes), steps=2, **options) if mesh is not None else 0.0
            for mesh, axes, options in (
                (straight, (0, 1), {}),
                (straight, (None, None), {}),
                (turned, (1, 0), {"normalize": "normuon"}),
                (turned, (0, 0), {"chosen": ("matrices", "stack"), "norm": "hyperball"}),
            )
        ]


def test_a_part_of_the_world_needs_no_new_process_groups():
    with contextlib.closing(Pool(5)) as five:
        assert max(map(max, five.run(part_of_the_world))) < CLOSE


FEW = {"chosen": ("matrices", "stack", "vectors")}  # decay rules do not depend on shapes
OPTIONS = {
    **{f"decay={rule}": {"decay": rule, **FEW, **RULE_OPTIONS.get(rule, {})} for rule in DECAY_RULES},
    "cautious": {"cautious": True},
    "plain momentum": {"nesterov": False},
    "heavy ball": {"momentum_form": "heavy_ball"},
    "polar express": {"orthogonalizer": "polar_express", "ns_steps": 7},
    "exact": {"orthogonalizer": "exact"},
    "simple quintic": {"orthogonalizer": "simple_quintic"},
    "aurora": {"orthogonalizer": "aurora"},
    "maximize": {"maximize": True},
    "scale": {"scale": "spectral"},
    "many rounds": {"chunk_bytes": 256},
    "base peak": {"peak": "base", "lr_multiplier": 0.5, "peak_lr": 2 * PEAK},
    "propagate": {"nonfinite": "propagate"},
    "missing gradients": {"absent": (0, 6, 11)},
}


def every_option(options):
    """Run all cases in one call: starting one on every rank takes longer than its steps."""
    return {name: sharded([3], [0], steps=2, **chosen) for name, chosen in options.items()}


def test_every_option_means_the_same_on_three_ranks(pool):
    assert far(pool.run(every_option, OPTIONS)) == {}


def block_periodic(mesh_shape, axes, **options):
    """Train groups of split matrices, with blocks in two of three steps."""
    return sharded(mesh_shape, axes, chosen=("fused", "fused_in", "heads"), block_period=3, **options)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("ranks", [2, 4])
def test_block_periodic_steps_equal_one_process(pool, ranks, axis):
    assert max(pool.run(block_periodic, [ranks], [axis], steps=6)) < CLOSE
    assert max(pool.run(block_periodic, [2, 2], [0, axis], steps=6, chunk_bytes=256)) < CLOSE


NORMS = {
    **{f"norm={rule}": {"norm": rule} for rule in NORM_RULES},
    "given target": {"norm": "target", "target_norm": 0.2},
    "given radius": {"norm": "hyperball", "target_norm": 0.2, "decay": "constant"},
    "norm of NorMuon": {"norm": "hyperball", "normalize": "normuon"},
    "norm, tensor rate": {"norm": "hyperball", "lr": torch.tensor(PEAK, dtype=torch.float64)},
}


def every_norm(mesh_shape, axes):
    return {name: sharded(mesh_shape, axes, steps=2, **options) for name, options in NORMS.items()}


@pytest.mark.parametrize(("mesh", "axes"), [([4], (0,)), ([3], (2,)), ([2, 2], (0, 1)), ([2, 2], (None, 0))], ids=str)
def test_norm_rules_see_whole_weights(pool, mesh, axes):
    """Norms are summed over ranks: for stacks, splits that shards cut through, and ranks with empty shards."""
    assert far(pool.run(every_norm, mesh, axes)) == {}


def norm_of_every_algorithm():
    options = {"chosen": ("matrices", "stack", "heads"), "steps": 3, "norm": "hyperball"}
    return {algorithm: sharded([3], [0], algorithm=algorithm, **options) for algorithm in ALGORITHMS}


def test_norm_rules_work_with_every_algorithm(pool):
    assert far(pool.run(norm_of_every_algorithm)) == {}


def with_a_weight_of_norm_zero(axis):
    """Step with an expert of zeros, which only one rank sees if ranks hold whole experts."""
    mesh = mesh_of(2, 2)
    value = torch.randn(4, 6, 5, dtype=torch.float64)
    value[3] = 0
    places = [Shard(0), Shard(axis)]
    params = [nn.Parameter(distribute_tensor(v, mesh, places)) for v in (value, torch.ones_like(value))]
    optimizer = MuonSW(params, lr=PEAK, norm="hyperball", matrix="stack")
    before = [param.detach().full_tensor() for param in params]
    errors = []
    for step in range(2):
        try:
            take_step(optimizer, step, give_sharded)
        except ValueError as error:
            errors.append(
                "here" if "parameter 0 of group 0 holds a weight of norm zero" in str(error) else str(error)[:12]
            )
    now = [param.detach().full_tensor() for param in params]
    return errors, all(torch.equal(a, b) for a, b in zip(before, now, strict=True)), len(optimizer.state)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_weight_of_norm_zero_is_an_error_on_every_rank(pool, axis):
    assert pool.run(with_a_weight_of_norm_zero, axis) == [(["here"] * 2, True, 0)] * 4


def one_gradient_missing_on_rank_one():
    mesh = mesh_of(3)
    if mesh is None:
        return 0.0
    alone = MuonSW(groups_of(GROUPS, plain), **DEFAULTS)
    together = MuonSW(groups_of(GROUPS, sharded_over(mesh, shard0)), **DEFAULTS)
    missing = {1, 5, 9, 12} if dist.get_rank() == 1 else set()

    def give(param, grad):
        number = [param is p for p in parameters(together)].index(True)
        return None if number in missing else give_sharded(param, grad)

    def without_rows(param, grad):
        number = [param is p for p in parameters(alone)].index(True)
        if number in {1, 5, 9, 12}:
            rows = -(-grad.shape[0] // 3)
            grad[rows : 2 * rows] = 0
        return grad

    for step in range(3):
        take_step(alone, step, without_rows)
        take_step(together, step, give)
    return worst(together, alone)


def test_a_gradient_missing_on_one_rank_counts_as_zero(pool):
    assert max(pool.run(one_gradient_missing_on_rank_one)) < CLOSE


def clipped_without_a_gradient_on_rank_one():
    params = [nn.Parameter(distribute_tensor(torch.ones(8, 2), mesh_of(4), [Shard(0)])) for _ in range(3)]
    optimizer = AdamWSW(params, lr=PEAK)
    for number, param in enumerate(params):
        param.grad = None if (number, dist.get_rank()) == (1, 1) else torch.ones_like(param)
    norm = clip_optimizer_grads_(optimizer, 1.0)
    return norm.item(), [None if p.grad is None else round(p.grad.to_local()[0, 0].item() ** -2) for p in params]


def test_a_gradient_missing_on_one_rank_is_clipped_as_zero(pool):
    for rank, (norm, squares) in enumerate(pool.run(clipped_without_a_gradient_on_rank_one, timeout=20)):
        assert norm == pytest.approx((3 * 16 - 4) ** 0.5)
        assert squares == [44, None if rank == 1 else 44, 44]


def averaged_without_a_gradient_on_rank_one():
    """Return the distance of Schedule-Free's parameters from one process, whose gradient is zero in those rows."""
    values = initial((8, 3), 0)
    params = [nn.Parameter(value) for value in (values, distribute_tensor(values.clone(), mesh_of(4), [Shard(0)]))]
    alone, together = (ScheduleFree(AdamWSW([param], lr=PEAK, decay="constant")) for param in params)
    for optimizer in (alone, together):
        optimizer.train()
    for step in range(3):
        params[0].grad = gradient((8, 3), step, 0)
        params[0].grad[2:4] = 0
        params[1].grad = None if dist.get_rank() == 1 else give_sharded(params[1], params[0].grad)
        alone.step()
        together.step()
    return worst(together, alone)


def test_a_gradient_missing_on_one_rank_is_averaged_as_zero(pool):
    assert max(pool.run(averaged_without_a_gradient_on_rank_one, timeout=20)) < CLOSE


def swapped_after_construction():
    together = MuonSW(groups_of(GROUPS, plain), **DEFAULTS)
    for group in together.param_groups:
        group["params"] = [nn.Parameter(distribute_tensor(p.detach(), mesh_of(4), [Shard(0)])) for p in group["params"]]
    return compared_with_one_process(together, give_sharded, DEFAULTS)


def test_dtensors_may_be_swapped_into_the_groups(pool):
    assert max(pool.run(swapped_after_construction)) < CLOSE


def mixed_group():
    """Plain, sharded and replicated parameters of equal shape in one group."""
    kinds = [None, [Shard(0)], [Shard(1)], [Replicate()]]
    values = [torch.randn(6, 5, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(4)]
    spread = [
        v.clone() if k is None else distribute_tensor(v, mesh_of(4), k) for v, k in zip(values, kinds, strict=True)
    ]
    alone, together = (MuonSW([nn.Parameter(v.clone()) for v in every], **DEFAULTS) for every in (values, spread))
    for step in range(3):
        take_step(alone, step, give_plain)
        take_step(together, step, lambda p, g: give_sharded(p, g) if isinstance(p, DTensor) else g)
    return worst(together, alone), together.summary().matrices, together.summary().parameters


def test_a_group_may_mix_plain_sharded_and_replicated_parameters(pool):
    for difference, matrices, moved in pool.run(mixed_group):
        assert difference < CLOSE
        assert (matrices, moved) == (4, {"muon": 120})


def odd(kind):
    """Make a parameter of ones whose shards are not contiguous (rows 0 and 2, rows 1 and 3) or partial sums."""
    placements = {
        "interleaved": [Shard(0), _StridedShard(0, split_factor=2)],
        "other stride": [_StridedShard(0, split_factor=3), Shard(0)],
        "partial": [Shard(0), Partial()],
    }[kind]
    mine = torch.ones(4 if kind == "partial" else 2, 5, dtype=torch.float64)
    shape = torch.Size((8, 5))
    return DTensor.from_local(mine, mesh_of(2, 2), placements, run_check=False, shape=shape, stride=(5, 1))


def step_of_odd_shards(kind, options):
    param = nn.Parameter(odd(kind))
    optimizer = MuonSW([{"params": [("odd", param)], **options}], **DEFAULTS)
    optimizer.routing()
    before = param.to_local().clone()
    param.grad = odd(kind)
    try:
        optimizer.step()
    except ValueError as error:
        return str(error), torch.equal(param.to_local(), before) and not optimizer.state
    return "taken", not torch.equal(param.to_local(), before)


@pytest.mark.parametrize("kind", ["interleaved", "other stride", "partial"])
@pytest.mark.parametrize(
    "options",
    [{}, {"normalize": "normuon"}, {"algorithm": "soap"}, {"algorithm": "adamw", "norm": "hyperball"}],
    ids=str,
)
def test_placements_that_are_not_blocks_are_refused_before_anything_changes(pool, kind, options):
    for error, unchanged in pool.run(step_of_odd_shards, kind, options):
        assert error.startswith("odd has placements (")
        assert "Partial" in error or "_StridedShard" in error
        assert "FSDP2, HSDP, tensor or expert parallelism" in error
        assert unchanged


@pytest.mark.parametrize("algorithm", ["adamw", "sgd", "lion"])
def test_elementwise_rules_accept_any_placement(pool, algorithm):
    assert pool.run(step_of_odd_shards, "interleaved", {"algorithm": algorithm}) == [("taken", True)] * 4


def low_precision(kind):
    """Return what each rank holds after some steps in bfloat16."""
    shared = {"process_group": dist.group.WORLD} if kind == "copies" else {}
    make = plain if shared else sharded_over(mesh_of(2, 2), [Replicate(), Shard(0)])
    optimizer = MuonSW(groups_of(["matrices", "vectors"], make, torch.bfloat16), lr=PEAK, **shared)
    for step in range(3):
        take_step(optimizer, step, give_plain if shared else give_sharded)
    return [getattr(p, "_local_tensor", p).tolist() for p in parameters(optimizer)]


@pytest.mark.parametrize(("kind", "replicas"), [("hybrid", [(0, 2), (1, 3)]), ("copies", [(0, 1), (0, 2), (0, 3)])])
def test_replicas_round_alike(pool, kind, replicas):
    held = pool.run(low_precision, kind)
    assert all(held[first] == held[second] for first, second in replicas)


def noise_of_shards():
    """Round equal elements on four shards: with equal noise the shards would be equal."""
    mesh = mesh_of(4)
    weight = nn.Parameter(distribute_tensor(torch.full((4, 512), 1.003, dtype=torch.bfloat16), mesh, [Shard(0)]))
    optimizer = MuonSW([{"params": [weight], "algorithm": "sgd"}], lr=1e-3, weight_decay=0.0)
    weight.grad = give_sharded(weight, torch.ones(4, 512, dtype=torch.bfloat16))
    optimizer.step()
    return weight.detach().full_tensor().float()


def test_shards_of_one_tensor_have_different_noise(pool):
    rows = pool.run(noise_of_shards)[0]
    assert len(rows.unique()) == 2
    assert not any(torch.equal(rows[i], rows[j]) for i in range(4) for j in range(i))
