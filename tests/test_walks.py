"""The walk of a local step in docs/design.md is the one that a step takes."""

import re
import sys
from pathlib import Path

import torch

import muonsw
from muonsw import MuonSW

SOURCE = Path(muonsw.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "design.md"
MOST_FILES = 16


def files_entered(function):
    """The files of the package in which `function` calls something, in the order of the first call."""
    entered = {}

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(SOURCE):
            entered.setdefault(path.relative_to(SOURCE).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return list(entered)


def local_walk():
    """What the page says: the numbered list under the heading of the local step."""
    section = re.search(r"^### A local step\n(.*?)^###", PAGE.read_text(encoding="utf-8"), re.M | re.S).group(1)
    return re.findall(r"^\d+\. `([\w/]+\.py)`", section, re.M)


def a_model_with_gradients():
    layers = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8), torch.nn.RMSNorm(8), torch.nn.Linear(8, 16)
    model = torch.nn.Sequential(*layers)
    optimizer = MuonSW.for_model(model, lr=0.02, weight_decay=0.1)
    assert {group["algorithm"] for group in optimizer.param_groups} == {"muon", "adamw"}
    model(torch.arange(16)).square().mean().backward()
    return optimizer


def test_a_local_step_enters_the_files_that_the_design_page_lists():
    optimizer = a_model_with_gradients()
    optimizer.step()  # the first one also makes state and plans
    assert files_entered(optimizer.step) == local_walk()


def test_a_local_step_enters_at_most_sixteen_files():
    assert 0 < len(local_walk()) <= MOST_FILES


def test_every_file_that_a_walk_names_exists():
    walks = re.search(r"^## Walks\n(.*?)^## ", PAGE.read_text(encoding="utf-8"), re.M | re.S).group(1)
    named = set(re.findall(r"`([\w/]+\.py)`", walks))
    assert len(named) > MOST_FILES
    assert [name for name in sorted(named) if not (SOURCE / name).exists()] == []
