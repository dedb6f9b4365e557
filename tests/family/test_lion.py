"""Lion: equal to lucidrains' steps and to a reference, whatever the decay rule."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from muonsw import MuonSW, clip_optimizer_grads_
from muonsw.reference import Decay
from tests.common.problems import RULE_OPTIONS, cosine, follow, lion, matrices, run, set_gradients
from tests.family.references.lion import ReferenceLion

RECORD = json.loads((Path(__file__).parent / "recorded/lion.json").read_text(encoding="utf-8"))
PEAK = 0.05


def test_equal_to_lucidrains_steps():
    first, *weights = [[torch.tensor(w, dtype=torch.float64) for w in step] for step in RECORD["weights"]]
    params = [nn.Parameter(w.clone()) for w in first]
    optimizer = lion(params, decay="constant", **RECORD["options"])
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.99)
    for grads, expected in zip(RECORD["grads"], weights, strict=True):
        for param, grad in zip(params, grads, strict=True):
            param.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
        torch.testing.assert_close([p.detach() for p in params], expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("rule", ["constant", "scaled", "squared", "independent", "fixed", "cosine", "log_time"])
def test_a_run_is_the_references_run(rule, cautious):
    params = matrices((7,), (4, 5), (), dtype=torch.float64)
    lam = {"squared": 2.0, "independent": 0.005, "fixed": 0.002}.get(rule, 0.3)
    decay = RULE_OPTIONS.get(rule, {})
    references = [
        ReferenceLion(p.detach(), Decay(rule, lam, PEAK, decay.get("total_steps", 1)), (0.8, 0.95), cautious)
        for p in params
    ]
    group = {"params": params, "algorithm": "lion", "betas": (0.8, 0.95), "cautious": cautious}
    optimizer = MuonSW([group], lr=PEAK, weight_decay=lam, decay=rule, **decay)
    assert follow(optimizer, params, references, 100, cosine(PEAK, 100)) < 1e-12


def test_clipping_leaves_it_alone_as_it_does_muon():
    params = matrices((4, 4))
    optimizer = lion(params, lr=0.01)
    set_gradients(params, 0)
    before = params[0].grad.clone()
    clip_optimizer_grads_(optimizer, 1e-3)
    assert torch.equal(params[0].grad, before)


def test_a_state_of_bfloat16_keeps_signs():
    params = matrices((16, 16))
    optimizer = lion(params, lr=0.01, state_dtype="bfloat16")
    run(optimizer, params, 3)
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.bfloat16
    other = matrices((16, 16))
    run(lion(other, lr=0.01), other, 3)
    assert ((params[0] - other[0]).abs() > 1e-3).float().mean() < 0.02
