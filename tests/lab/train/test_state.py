"""The optimizer of a run: members of the family move the same matrices, and AdamW the rest."""

import pytest
import torch

from muonsw.lab.model import Decoder
from muonsw.lab.train.config import OptimizerConfig
from muonsw.lab.train.state import build_optimizer
from muonsw.presets import PRESETS
from tests.lab.train.small_runs import MODEL


@pytest.mark.parametrize("router", ["adamw", "muon"])
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_moves_the_matrices_that_muon_would(name, router):
    config = {"lr": 0.01, "adam_lr": 0.02, "ns_dtype": "float32", "router": router}
    optimizer = build_optimizer(Decoder(MODEL), OptimizerConfig(preset=name, **config))
    muon = build_optimizer(Decoder(MODEL), OptimizerConfig(**config))
    algorithm = PRESETS[name]["algorithm"]
    assert _routes(optimizer, algorithm) == _routes(muon, "muon")
    for group in optimizer.param_groups:
        if group["algorithm"] == algorithm:
            assert {key: group[key] for key in PRESETS[name]} == PRESETS[name]
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        param.grad = torch.randn_like(param)
    before = [param.detach().clone() for group in optimizer.param_groups for param in group["params"]]
    optimizer.step()
    after = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(b.isfinite().all() and not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def _routes(optimizer, algorithm):
    """By role: whether the member or AdamW moves it, how far at most, and how it decays."""
    keys = ("role", "lr", "weight_decay", "decay")
    return {(group["algorithm"] == algorithm, *(group[key] for key in keys)) for group in optimizer.param_groups}
