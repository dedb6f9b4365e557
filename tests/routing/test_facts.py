"""What the rules know of a model."""

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
    assert [found.name for found in classify(model)] == [name for name, _ in model.named_parameters()]


def lines_run_to_classify(model):
    """How many lines of the library run, loops counted by their turns."""
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
