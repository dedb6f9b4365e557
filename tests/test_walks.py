"""A settled step stays short enough to read: it runs few library functions, which nest little."""

import sys
from pathlib import Path

import torch

import muonsw
from muonsw import MuonSW

SOURCE = Path(muonsw.__file__).parent
# Lower these with the code; a step of torch's Muon has 10 and 6.
MOST_FUNCTIONS, DEEPEST, MOST_KEYS = 64, 10, 34
# Scopes that Python names.
UNNAMED = ("<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")


def walk(function):
    """The named functions of the package that a call runs, and how deep they nest in each other."""
    entered, open_frames, deepest = set(), 0, 0

    def note(frame, event, _):
        nonlocal open_frames, deepest
        code = frame.f_code
        ours = Path(code.co_filename).is_relative_to(SOURCE) and code.co_name not in UNNAMED
        if ours and event == "call":
            open_frames += 1
            deepest = max(deepest, open_frames)
            entered.add((code.co_filename, code.co_qualname))
        elif ours and event == "return":
            open_frames -= 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return entered, deepest


def a_model_with_gradients():
    layers = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), torch.nn.RMSNorm(8), torch.nn.Linear(8, 16)
    model = torch.nn.Sequential(*layers)
    optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.1)
    assert {group["algorithm"] for group in optimizer.param_groups} == {"muon", "adamw"}
    model(torch.arange(16)).square().mean().backward()
    return optimizer


def test_a_settled_local_step_runs_few_functions_and_nests_them_little():
    optimizer = a_model_with_gradients()
    optimizer.step()  # the first one also makes state and plans
    entered, deepest = walk(optimizer.step)
    assert 0 < len(entered) <= MOST_FUNCTIONS
    assert 0 < deepest <= DEEPEST


def test_a_muon_group_has_few_keys():
    muon = next(group for group in a_model_with_gradients().param_groups if group["algorithm"] == "muon")
    assert len(muon) <= MOST_KEYS
