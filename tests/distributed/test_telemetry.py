"""Every rank gets the record that one process would."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

from muonsw import MuonSW, Telemetry
from tests.distributed.problems import (
    GROUPS,
    PEAK,
    give_plain,
    give_sharded,
    groups_of,
    initial,
    mesh_of,
    plain,
    sharded_over,
    take_step,
)
from tests.distributed.test_sharded import along


def built(kind, **options):
    options = {"lr": PEAK, "weight_decay": 0.5, **options}
    if kind == "alone":
        return MuonSW(groups_of(GROUPS, plain), **options), give_plain
    if kind == "copies":
        return MuonSW(groups_of(GROUPS, plain), process_group=dist.group.WORLD, **options), give_plain
    mesh, placements = {
        "rows": (mesh_of(4), along(0)),
        "columns": (mesh_of(4), along(1)),
        "hybrid": (mesh_of(2, 2), [Replicate(), Shard(0)]),
        "both": (mesh_of(2, 2), along(0, 1)),
    }[kind]
    return MuonSW(groups_of(GROUPS, sharded_over(mesh, placements)), **options), give_sharded


def poison(give):
    def put(param, grad):
        grad.view(-1)[0] = torch.nan
        return give(param, grad)

    return put


def records(kind, *, skip=False, **options):
    optimizer, give = built(kind, **options)
    with Telemetry(optimizer, every=1, spectral_norm=True, condition=True) as telemetry, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(2):
            take_step(optimizer, step, poison(give) if skip and step == 1 else give)
    return telemetry.records


def numbers(record, path=()):
    """Yield all numbers of a record with their paths."""
    for key, value in record.items() if isinstance(record, dict) else enumerate(record):
        if isinstance(value, dict | list):
            yield from numbers(value, (*path, key))
        else:
            yield (*path, key), value


def both_records(kind, **options):
    return records("alone", **options), records(kind, **options)


@pytest.mark.parametrize(("kind", "options"), [
    ("rows", {}), ("columns", {"norm": "hyperball"}), ("both", {"cautious": True}), ("hybrid", {"skip": True}),
    ("copies", {}),
], ids=str)  # fmt: skip
def test_records_on_every_rank_equal_one_process(pool, kind, options):
    for alone, together in pool.run(both_records, kind, **options):
        assert len(alone) == len(together) == 2
        assert_same(alone, together)


def assert_same(alone, together):
    for expected, found in zip(map(dict, map(numbers, alone)), map(dict, map(numbers, together)), strict=True):
        assert expected.keys() == found.keys()
        for place, value in expected.items():
            same = found[place] == value
            if isinstance(value, float) and isinstance(found[place], float):
                same = math.isclose(found[place], value, rel_tol=1e-6, abs_tol=1e-9)
            assert same, (place, value, found[place])


def layers_of_experts(sharded):
    """Measure a stack along two axes; cut along the second, a rank's matrices are not neighbours."""
    make = sharded_over(mesh_of(4), [Shard(1)]) if sharded else plain
    groups = [
        {"params": [("muon", make(initial((2, 5, 3, 4), 1), {}))], "role": "experts", "matrix": "stack"},
        {"params": [("adamw", make(initial((2, 5, 3, 4), 2), {}))], "role": "experts", "algorithm": "adamw"},
    ]
    optimizer = MuonSW(groups, lr=PEAK)
    with Telemetry(optimizer, every=1) as telemetry:
        take_step(optimizer, 0, give_sharded if sharded else give_plain)
    return telemetry.records


def test_each_matrix_of_a_stack_along_two_axes_is_measured(pool):
    alone = pool.run(layers_of_experts, False)[0]
    for together in pool.run(layers_of_experts, True):
        assert_same(alone, together)


def low_precision(sharded, algorithm):
    """Take one step from the same weights and state; later ones have different rounding noise."""
    make = sharded_over(mesh_of(4), [Shard(0)]) if sharded else plain
    shapes = [((7, 5), {}), ((5, 4, 3), {"matrix": "stack"}), ((3, 9), {})]
    groups = [
        {"params": [(str(number), make(initial(shape, number, torch.bfloat16), {}))], "algorithm": algorithm, **options}
        for number, (shape, options) in enumerate(shapes)
    ]
    optimizer, give = MuonSW(groups, lr=PEAK, ns_dtype="float32"), give_sharded if sharded else give_plain
    take_step(optimizer, 0, give)
    for number, param in enumerate(param for group in optimizer.param_groups for param in group["params"]):
        weight = initial(param.shape, number, torch.bfloat16)
        param.data.copy_(give(param, weight))

    def give_some(param, grad):
        return None if sharded and dist.get_rank() == 3 and param.shape == (3, 9) else give(param, grad)

    with Telemetry(optimizer, every=1) as telemetry:
        take_step(optimizer, 1, give_some)
    return {name: values["update_rms"] for name, values in telemetry.records[0]["parameters"].items()}


@pytest.mark.parametrize("algorithm", ["muon", "adamw", "soap"])
def test_updates_of_sharded_low_precision_weights_are_measured_before_rounding(pool, algorithm):
    """Rank 3 has an empty shard of the last parameter and no gradient for it."""
    alone = pool.run(low_precision, False, algorithm)[0]
    for together in pool.run(low_precision, True, algorithm):
        assert together == pytest.approx(alone, rel=1e-3)


def measured_on_one_rank(kind):
    optimizer, give = built(kind)
    if dist.get_rank() == 0:
        Telemetry(optimizer, every=1)
    try:
        take_step(optimizer, 0, give)
    except RuntimeError as error:
        return str(error)
    return ""


def test_telemetry_on_one_of_several_ranks_raises(pool):
    for message in pool.run(measured_on_one_rank, "rows", timeout=20):
        assert "telemetry that measures this step (attach it on every rank" in message


def test_with_replicas_one_rank_may_measure_alone(pool):
    assert set(pool.run(measured_on_one_rank, "copies", timeout=20)) == {""}


def weights_of_a_skipped_step(kind):
    """On rank 1 one gradient is missing and another is NaN."""
    optimizer, give = built(kind)

    def give_some(param, grad):
        is_missing = kind != "alone" and dist.get_rank() == 1 and param.shape == (7, 5)
        return None if is_missing else poison(give)(param, grad)

    with Telemetry(optimizer, every=1) as telemetry, warnings.catch_warnings(action="ignore"):
        take_step(optimizer, 0, give_some)
    return [telemetry.records[0]["all"][key] for key in ("numel", "weight_rms")]


def test_a_skipped_step_is_measured_with_a_gradient_missing_on_one_rank(pool):
    expected, *_ = pool.run(weights_of_a_skipped_step, "alone")
    for found in pool.run(weights_of_a_skipped_step, "rows"):
        assert found == pytest.approx(expected)
