"""Facts about a model that the rules use."""

import sys

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from muonsw.routing import classify
from tests.routing.models import Model, roles_of


def test_frozen_parameters_are_left_out():
    model = Model()
    model.conv.requires_grad_(False)
    assert "conv.weight" not in roles_of(MuonSW.for_model(model, lr=0.02))


@pytest.mark.parametrize("model", [nn.ParameterList([torch.ones(3, 2)]), nn.ParameterDict({"w": torch.ones(3, 2)})])
def test_a_model_that_is_a_bare_list_of_parameters_is_routed(model):
    assert [actual.name for actual in classify(model)] == [name for name, _ in model.named_parameters()]


def lines_run_to_classify(model):
    """Count the lines of the library that run, with each turn of a loop."""
    lines = 0

    def tally(frame, event, _):
        nonlocal lines
        lines += event == "line"
        return tally if "muonsw" in frame.f_code.co_filename else None

    sys.settrace(tally)
    try:
        list(classify(model))
    finally:
        sys.settrace(None)
    return lines


def test_work_grows_with_the_model_and_not_with_its_square():
    """Four times the layers run at most eight times the lines; squared growth would be sixteen."""

    def expert():
        return nn.ModuleDict({"gate": nn.Linear(8, 4), "up": nn.Linear(8, 4), "down": nn.Linear(4, 8)})

    def mixture(layers):
        moes = [
            {"router": nn.Linear(8, 6), "experts": nn.ModuleList(expert() for _ in range(6))} for _ in range(layers)
        ]
        blocks = [nn.ModuleDict({"attention": nn.Linear(8, 8), "moe": nn.ModuleDict(moe)}) for moe in moes]
        return nn.ModuleDict({"layers": nn.ModuleList(blocks), "head": nn.Linear(8, 50)})

    assert lines_run_to_classify(mixture(16)) < 8 * lines_run_to_classify(mixture(4))


# wrappers


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_patterns_and_names_see_through_wrappers(wrap):
    patterns = {"embed.weight": {"lr": 0.5}, "blocks.*.qkv.weight": {"split_sizes": (8, 8, 8)}}
    plain = MuonSW.for_model(Model(), lr=0.02, patterns=patterns)
    wrapped = MuonSW.for_model(wrap(Model()), lr=0.02, patterns=patterns)
    assert [g["param_names"] for g in wrapped.param_groups] == [g["param_names"] for g in plain.param_groups]
    assert roles_of(wrapped) == roles_of(plain)


def test_an_attribute_named_module_keeps_its_name():
    model = nn.Module()
    model.module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    assert set(roles_of(MuonSW.for_model(model, lr=0.02))) == {"module.0.weight", "module.1.weight"}


def test_the_name_of_an_adapter_changes_no_role_of_what_peft_trains_in_full():
    def trained_copy(adapter, outputs):
        copies = nn.ModuleDict({adapter: nn.Linear(8, outputs)})
        frozen = nn.Linear(8, outputs).requires_grad_(False)
        return nn.ModuleDict({"original_module": frozen, "modules_to_save": copies})

    for adapter in ("default", "my_lora_1"):
        block = nn.ModuleDict({"gate": trained_copy(adapter, 6), "up": nn.Linear(8, 12), "down": nn.Linear(12, 8)})
        model = nn.ModuleDict({"embed": nn.Embedding(20, 8), "body": block, "out": trained_copy(adapter, 20)})
        roles = roles_of(MuonSW.for_model(model, lr=0.02))
        assert roles[f"out.modules_to_save.{adapter}.weight"] == "head"
        assert roles[f"body.gate.modules_to_save.{adapter}.weight"] == "router"


class Router(nn.Linear):
    """Known by its class alone."""


class Expert(nn.Sequential):
    """Known by its class alone."""


def test_fully_shard_changes_no_role(pretended_ranks):
    """fully_shard renames each module's class."""
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
