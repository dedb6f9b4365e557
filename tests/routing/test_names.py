"""Names and classes with what wrappers add to them."""

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from tests.routing.models import Model, roles_of


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_patterns_and_names_see_through_wrappers(wrap):
    patterns = {"embed.weight": {"lr": 0.5}, "blocks.*.qkv.weight": {"split_sizes": (8, 8, 8)}}
    plain = MuonSW.for_model(Model(), lr=0.02, patterns=patterns)
    wrapped = MuonSW.for_model(wrap(Model()), lr=0.02, patterns=patterns)
    assert [g["param_names"] for g in wrapped.param_groups] == [g["param_names"] for g in plain.param_groups]
    assert roles_of(wrapped) == roles_of(plain)


def test_a_module_that_is_only_called_module_keeps_its_name():
    model = nn.Module()
    model.module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    assert set(roles_of(MuonSW.for_model(model, lr=0.02))) == {"module.0.weight", "module.1.weight"}


class Router(nn.Linear):
    """Known by its class alone."""


class Expert(nn.Sequential):
    """Known by its class alone."""


def test_fully_shard_changes_no_role(pretended_ranks):
    """It gives each module a class of another name."""
    from torch.distributed.fsdp import fully_shard

    experts = nn.ModuleList(Expert(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in range(4))
    model = nn.ModuleDict({"choose": Router(8, 4), "parts": experts, "out": nn.Linear(8, 20)})
    expected = roles_of(MuonSW.for_model(model, lr=0.02))
    assert {"router", "experts", "head"} < set(expected.values())
    pretended_ranks(1)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    for module in (model["choose"], *experts, model["out"]):
        fully_shard(module, mesh=mesh)
    assert roles_of(MuonSW.for_model(model, lr=0.02)) == expected
