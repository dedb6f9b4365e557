"""Presets of `for_model`: the authors' options by name."""

import re
from pathlib import Path

import pytest
import torch

from muonsw import PRESETS, SGDSW, AdamWSW, MuonSW
from muonsw.state import state_bytes


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.RMSNorm(16), torch.nn.Linear(16, 8))


@pytest.mark.parametrize(("cls", "name"), [(cls, name) for cls in (MuonSW, AdamWSW) for name in PRESETS])
def test_a_preset_trains_hidden_matrices_by_its_options(cls, name):
    built = model()
    before = [param.detach().clone() for param in built.parameters()]
    optimizer = cls.for_model(built, lr=0.02, preset=name)
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in PRESETS[name]} == PRESETS[name]
    assert (group["decay"], group["weight_decay"]) == ("scaled", 0.1)
    members = (group["algorithm"], group.get("precondition"), group.get("normalize"))
    assert " + ".join(filter(None, members)) in optimizer.routing()
    for _ in range(2):
        optimizer.zero_grad()
        built(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()
    assert all(not torch.equal(a, b) and b.isfinite().all() for a, b in zip(before, built.parameters(), strict=True))


@pytest.mark.parametrize("cls", [MuonSW, AdamWSW, SGDSW])
def test_explicit_options_override_a_preset(cls):
    options = {"scale": "spectral", "normalize_beta2": 0.9, "momentum": 0.9, "heads": 2}
    for group in cls.for_model(model(), lr=0.02, preset="normuon", **options).param_groups:
        is_muon = group["role"] == "hidden"
        assert group["algorithm"] == ("muon" if is_muon else "adamw")
        assert ({**options, "normalize": "normuon"}.items() <= group.items()) == is_muon
        assert ("heads" in group) == is_muon


def test_under_a_preset_of_another_algorithm_the_rest_is_adamw():
    optimizer = MuonSW.for_model(model(), lr=0.02, preset="soap", precondition_frequency=3)
    algorithms = {group["role"]: group["algorithm"] for group in optimizer.param_groups}
    assert algorithms.pop("hidden") == "soap"
    assert set(algorithms.values()) == {"adamw"}
    assert optimizer.param_groups[0]["precondition_frequency"] == 3


def test_an_option_equal_to_a_default_of_the_class_is_kept():
    assert MuonSW.for_model(model(), lr=0.02, algorithm="sgd", momentum=0.95).param_groups[0]["momentum"] == 0.95
    with pytest.raises(ValueError, match="'ns_steps' is an option of muon and dion2, not of soap"):
        MuonSW.for_model(model(), lr=0.02, algorithm="soap", ns_steps=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "normoun"}, "unknown preset 'normoun' (did you mean 'normuon'?)"),
        ({"preset": "normuon", "algorithm": "soap"}, "preset='normuon' uses algorithm='muon'; leave out the preset"),
        ({"algorithm": "soap", "nesterovv": True}, "did you mean 'nesterov'"),
    ],
    ids=str,
)
def test_invalid_presets_and_options_are_refused(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        MuonSW.for_model(model(), lr=0.1, **options)


PAGE = Path(__file__).parents[1] / "docs" / "guide" / "family.md"


@pytest.mark.parametrize("shape", [(6, 6), (4, 10), (12, 5)])
def test_the_page_names_every_preset_with_the_state_it_keeps(shape):
    """The formulas of its table equal the allocated state, without step counts."""
    rows = re.findall(r"^\| .*? \| `(\w+)`.*? \| (.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name, _ in rows if name != "block_period"] == [name for name, _ in rows if name in PRESETS]
    assert set(PRESETS) == {name for name, _ in rows} - {"block_period"}
    m, n = shape
    for name, formula in ((name, formula) for name, formula in rows if name in PRESETS):
        python = formula.removesuffix(" in a block").replace("mn", "m*n").replace("²", "**2")
        python = re.sub(r"(\d)([mn])", r"\1*\2", python)
        optimizer = MuonSW.for_model(torch.nn.Sequential(torch.nn.Linear(n, m, bias=False)), lr=0.1, preset=name,
                                     patterns={"0.weight": {"algorithm": PRESETS[name]["algorithm"]}})  # fmt: skip
        held = {key: size for key, size in state_bytes(optimizer.param_groups).items() if key not in ("step", "moves")}
        assert sum(held.values()) == 4 * eval(python, {"m": m, "n": n, "min": min, "max": max}), name
