"""What members of slots and matrix algorithms are given: state, step count, errors that help."""

import copy

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from tests.common.problems import assert_same, clones, matrices, run


def build(params, **options):
    group = {"params": params, "algorithm": "matrix_toy", **options}
    return MuonSW([group], lr=0.05, weight_decay=0.3, decay="constant")


@pytest.mark.usefixtures("matrix_toy")
def test_state_is_kept_by_matrix():
    param = nn.Parameter(torch.randn(3, 10, 4))
    optimizer = build([param], matrix="stack", split_sizes=(4, 6))
    param.grad = torch.randn_like(param)
    optimizer.step()
    shapes = {key: tuple(value.shape) for key, value in optimizer.state[param].items()}
    assert shapes == {
        "toy_average": (3, 10, 4),
        "toy_factor.0": (3, 4, 4),
        "toy_factor.1": (3, 6, 6),
        "toy_root.0": (3, 4, 1),
        "toy_root.1": (3, 6, 1),
    }


def test_a_member_may_be_changed_in_a_run_and_its_state_is_left_behind_on_load():
    params = matrices((4, 6), (6, 4))
    optimizer = MuonSW(params, lr=0.05, ns_dtype="float32", normalize="normuon")
    run(optimizer, params, 2)
    group = optimizer.param_groups[0]
    group["normalize"], group["normalize_axis"] = "adamuon", None
    group["precondition"] = "muon2"
    run(optimizer, params, 2, start=2)
    resumed = clones(params)
    other = MuonSW(resumed, lr=0.05, ns_dtype="float32")
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert sorted(other.state[resumed[0]]) == ["exp_avg_sq", "exp_avg_sq_direction", "momentum_buffer"]
    run(optimizer, params, 2, start=4)
    run(other, resumed, 2, start=4)
    assert_same(params, resumed)


def test_a_group_with_another_member_takes_no_options_of_the_constructors():
    one, two, three = (matrices((4, 6))[0] for _ in range(3))
    groups = [{"params": [one]}, {"params": [two], "normalize": None}, {"params": [three], "normalize": "adamuon"}]
    optimizer = MuonSW(groups, lr=0.05, normalize="normuon", normalize_beta2=0.9, normalize_axis="longer")
    found = [(group["normalize"], group.get("normalize_beta2")) for group in optimizer.param_groups]
    assert found == [("normuon", 0.9), (None, None), ("adamuon", None)]
