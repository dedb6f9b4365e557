"""Dion2: equal to its authors' steps and to a reference; only the selected slices move and are forgotten."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from muonsw.reference import Decay
from tests.common.problems import cosine, follow, matrices
from tests.family.references.dion2 import ReferenceDion2

RECORD = json.loads((Path(__file__).parent / "recorded/dion2.json").read_text(encoding="utf-8"))
PEAK = 0.05


def wide(values):
    return torch.tensor(values, dtype=torch.float64)


def dion2(params, *, group=None, **options):
    """Dion2, which has no class of its own."""
    return MuonSW([{"params": params, "algorithm": "dion2", "ns_dtype": "float64", **(group or {})}], **options)


@pytest.mark.parametrize("recorded", RECORD["runs"])
def test_equal_to_the_authors_steps(recorded):
    options, (first, *weights) = RECORD["options"], map(wide, recorded["weights"])
    param = nn.Parameter(first.clone())
    group = {"scale": "spectral", "fraction": options["fraction"], "momentum": options["ef_decay"]}
    rates = {"lr": options["lr"], "weight_decay": options["weight_decay"]}
    optimizer = dion2([param], group=group, decay="constant", **rates)
    for grad, weight, momentum in zip(recorded["grads"], weights, recorded["momenta"], strict=True):
        param.grad = wide(grad)
        optimizer.step()
        torch.testing.assert_close(param.detach(), weight, rtol=0, atol=1e-13)
        torch.testing.assert_close(optimizer.state[param]["momentum_buffer"], wide(momentum), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("rule", "fraction"), [("constant", 0.25), ("scaled", 0.25), ("scaled", 1.0)])
def test_a_run_is_the_references_run(rule, fraction):
    """Under two rules; the others are held against their formulas with every algorithm in `tests/common`."""
    params = matrices((7, 9), (8, 3), (5, 5), (1, 4), dtype=torch.float64)
    references = [ReferenceDion2(p.detach(), Decay(rule, 0.3, PEAK), fraction, 0.9) for p in params]
    group = {"fraction": fraction, "momentum": 0.9}
    optimizer = dion2(params, group=group, lr=PEAK, weight_decay=0.3, decay=rule)
    assert follow(optimizer, params, references, 60, cosine(PEAK, 60)) < 1e-10


def test_only_the_largest_slices_move_and_all_decay():
    param = nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
    optimizer = dion2([param], group={"fraction": 0.5}, lr=0.1, weight_decay=0.5, decay="constant")
    param.grad = torch.randn(4, 6, dtype=torch.float64) * wide([[0.1], [3.0], [2.0], [0.2]])
    optimizer.step()
    still, moved = param.detach()[[0, 3]], param.detach()[[1, 2]]
    torch.testing.assert_close(still, torch.full((2, 6), 0.95, dtype=torch.float64), rtol=0, atol=1e-15)
    assert (moved - 0.95).abs().min() > 1e-4
    momentum = optimizer.state[param]["momentum_buffer"]
    assert torch.equal(momentum[[0, 3]], param.grad[[0, 3]])
    torch.testing.assert_close(momentum[[1, 2]], 0.95 * param.grad[[1, 2]], rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"fraction": 0.0}, r"fraction=0.0: must be in \(0, 1\]"),
        ({"fraction": 1.5}, r"fraction=1.5: must be in \(0, 1\]"),
        ({"fractions": 0.5}, "did you mean 'fraction'"),
        ({"ef_decay": 0.9}, "'ef_decay' is not an option: it is called momentum here"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_name(group, message):
    with pytest.raises(ValueError, match=message):
        dion2(matrices((2, 2)), group=group)


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"needs matrices, but .* has shape \(3,\)"):
        dion2(matrices((3,)))
