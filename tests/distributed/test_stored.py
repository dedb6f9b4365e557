"""8-bit state over shards: any number of ranks has the codes of one process, also after a checkpoint."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muonsw import MuonSW
from muonsw.distributed.shards import whole
from tests.distributed.pool import CaseError
from tests.distributed.problems import give_sharded, group_of, mesh_of, parameters

# Cut unevenly, with an empty shard on four ranks, and three-dimensional.
SHAPES = [(37, 128), (3, 2048), (9, 16, 64)]


def build(algorithm, mesh=None, axis=0, dtype=torch.float32, state_dtype="int8", **options):
    torch.manual_seed(0)
    values = [torch.randn(shape).to(dtype) for shape in SHAPES]
    if mesh is not None:
        values = [distribute_tensor(value, mesh, [Shard(axis % value.dim())]) for value in values]
    group = {"params": [nn.Parameter(value) for value in values], "algorithm": algorithm, "matrix": "stack"}
    return MuonSW([group], lr=0.01, weight_decay=0.1, ns_dtype="float32", state_dtype=state_dtype, **options)


def steps(optimizer, first, count):
    for step in range(first, first + count):
        for number, param in enumerate(optimizer.param_groups[0]["params"]):
            grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + number)).to(param.dtype)
            param.grad = give_sharded(param, grad) if isinstance(param, DTensor) else grad
        optimizer.step()


def differences(optimizer, alone, *, first=0, count=0):
    """Step both; return the keys of state that differ, and the largest difference of a weight."""
    steps(optimizer, first, count)
    steps(alone, first, count)
    pairs, keys = list(zip(parameters(optimizer), parameters(alone), strict=True)), []
    for param, other in pairs:
        mine, theirs = optimizer.state[param], alone.state[other]
        assert mine.keys() == theirs.keys()
        keys += [key for key in mine if not torch.equal(whole(mine[key]), whole(theirs[key]))]
    return keys, max((whole(p) - whole(o)).abs().max().item() for p, o in pairs)


def compared_with_one_process(algorithm, *, copies=False, **options):
    divided = {"process_group": dist.group.WORLD} if copies else {}
    optimizer = build(algorithm, None if copies else mesh_of(4), **divided, **options)
    return differences(optimizer, build(algorithm, **options), count=3)


@pytest.mark.parametrize(("algorithm", "options", "close"), [
    ("adamw", {}, 1e-5), ("lion", {}, 1e-5), ("muon", {}, 1e-5), ("muon", {"copies": True}, 1e-5),
    ("muon", {"normalize": "adamuon"}, 1e-3),
    # each rank rounds weights with different noise
    ("adamw", {"dtype": torch.bfloat16}, 1), ("muon", {"dtype": torch.bfloat16}, 1),
], ids=str)  # fmt: skip
def test_shards_along_the_first_axis_have_the_codes_of_one_process(pool, algorithm, options, close):
    """Averages of directions may differ, because directions are summed in another order."""
    for keys, distance in pool.run(compared_with_one_process, algorithm, **options):
        assert [key for key in keys if "direction" not in key] == []
        assert distance < close


def template(optimizer, flatten):
    """Return the state as torch's distributed checkpoint saves it."""
    model = nn.ParameterList(optimizer.param_groups[0]["params"])
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    return model, options, {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}


def saved(folder, algorithm, flatten):
    optimizer = build(algorithm, mesh_of(4))
    steps(optimizer, 0, 2)
    dcp.save(template(optimizer, flatten)[2], checkpoint_id=folder)


def resumed(folder, algorithm, flatten, ranks):
    mesh, group = mesh_of(ranks), group_of(ranks)
    if group is None:
        return [], 0.0
    optimizer, alone = build(algorithm, mesh), build(algorithm)
    model, options, state = template(optimizer, flatten)
    dcp.load(state, checkpoint_id=folder, process_group=group)
    steps(alone, 0, 2)
    with torch.no_grad():
        for param, other in zip(model, parameters(alone), strict=True):
            param.copy_(give_sharded(param, other.detach()))
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    return differences(optimizer, alone, first=2, count=2)


@pytest.mark.parametrize(("algorithm", "flatten"), [("adamw", False), ("muon", True)])
def test_a_checkpoint_of_four_ranks_resumes_on_fewer(pool, tmp_path, algorithm, flatten):
    pool.run(saved, str(tmp_path / "checkpoint"), algorithm, flatten)
    for ranks in (4, 2, 1):
        for keys, distance in pool.run(resumed, str(tmp_path / "checkpoint"), algorithm, flatten, ranks):
            assert keys == []
            assert distance < 1e-5


def along_the_second_axis():
    steps(build("adamw", mesh_of(2), axis=1), 0, 1)


def swapped_in_after_construction():
    optimizer, mesh = build("adamw"), mesh_of(4)
    (group,) = optimizer.param_groups
    group["params"] = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(1)])) for p in group["params"]]
    steps(optimizer, 0, 1)


@pytest.mark.parametrize("case", [along_the_second_axis, swapped_in_after_construction])
def test_shards_that_cut_through_blocks_are_refused(pool, case):
    """In 37 x 128 each row is one block, which the ranks would divide."""
    with pytest.raises(CaseError, match=r"blocks of 128 along its rows, and .*Shard\(dim=1\).* would cut"):
        pool.run(case)


def from_float_state_and_back():
    """Convert float state to codes and back during a run."""
    optimizers = [build("adamw", mesh, state_dtype="float32") for mesh in (mesh_of(4), None)]
    for optimizer in optimizers:
        steps(optimizer, 0, 1)
        for dtype in ("int8", "float32", "int8"):
            state = optimizer.state_dict()
            state["param_groups"][0]["state_dtype"] = dtype
            optimizer.load_state_dict(state)
            steps(optimizer, 1, 1)
    return differences(*optimizers)


def test_float_states_load_as_codes_and_the_reverse(pool):
    for keys, distance in pool.run(from_float_state_and_back):
        assert keys == []
        assert distance < 1e-6


def codes_as_floats(kind, axis):
    """Load codes as float32 on shards that cut through blocks."""
    saved = build("adamw", mesh_of(4) if kind == "shards" else None)
    steps(saved, 0, 1)
    state = saved.state_dict()
    state["param_groups"][0]["state_dtype"] = "float32"
    optimizers = [build("adamw", mesh, axis, state_dtype="float32") for mesh in (mesh_of(4), None)]
    for optimizer in optimizers:
        optimizer.load_state_dict(state)
    return differences(*optimizers)


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("kind", ["alone", "shards"])
def test_codes_load_as_floats_on_shards_that_cut_through_their_blocks(pool, axis, kind):
    for keys, distance in pool.run(codes_as_floats, kind, axis):
        assert keys == []
        assert distance == 0
