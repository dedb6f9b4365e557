"""`scale_weight_decay` on optimizers of other packages; the guide lists the tested ones."""

import copy

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from muonsw import scale_weight_decay

LR, LAMBDA, STEPS = 0.02, 0.5, 6
DECOUPLED = {"decoupled_weight_decay": True}
SCALED = {
    "torch.optim": {"AdamW": {}, "Muon": {}, "Adafactor": {}} | dict.fromkeys(("Adam", "NAdam", "RAdam"), DECOUPLED),
    "timm.optim": {"AdamWLegacy": {}, "NAdamW": {}, "Lion": {}, "SGDW": {}, "Mars": {}},
    "dion": {"Muon": {}, "NorMuon": {}, "Dion": {}, "Dion2": {}},
    "pytorch_optimizer": {"AdamW": {}, "Lion": {}, "StableAdamW": {}, "AdaBelief": {}, "CAME": {}, "MARS": {}},
    "bitsandbytes.optim": {"AdamW": {}, "AdamW8bit": {}, "PagedAdamW": {}, "Lion8bit": {}, "AdEMAMix": {}},
    "torchao.optim": {"AdamW8bit": {}, "AdamW4bit": {}, "AdamWFp8": {}},
}
NOT_DECOUPLED = ("SGDP", "LARS", "AccSGD", "FAdam", "AdamP", "Prodigy", "ScheduleFreeAdamW", "SPlus", "SWATS", "APOLLO")
REFUSED = {
    "timm.optim": {"Lars": {}, "Lamb": {}, "MADGRAD": {}, "Adopt": {}, "NAdamLegacy": {}, "NvNovoGrad": {}, "SGDP": {}},
    "pytorch_optimizer": {name: {} for name in NOT_DECOUPLED},
    "bitsandbytes.optim": {"SGD8bit": {"momentum": 0.9}, "RMSprop": {}, "Adagrad8bit": {}, "LARS": {"momentum": 0.9}},
}


@pytest.fixture(autouse=True)
def _without_compiling():
    """Some optimizers compile their step, which takes minutes on a CPU and changes no value."""
    with torch.compiler.set_stance("force_eager"):
        yield


def cases(table):
    return [
        pytest.param(package, name, options, id=f"{package}.{name}")
        for package, members in table.items()
        for name, options in members.items()
    ]


def build(package, name, options, weight):
    kind = getattr(pytest.importorskip(package), name)
    return kind([weight], lr=LR, weight_decay=LAMBDA, **options)


def decayed(optimizer, scheduler, weight, start, end):
    """Step with zero gradients, so that only decay moves the weight; return the weight that the rule predicts."""
    expected = weight.detach().clone()
    for _ in range(start, end):
        weight.grad = torch.zeros_like(weight)
        expected *= 1 - LAMBDA * float(optimizer.param_groups[0]["lr"]) ** 2 / LR
        optimizer.step()
        scheduler.step()
    return expected


@pytest.mark.parametrize(("package", "name", "options"), cases(SCALED))
def test_decay_follows_the_rule_and_resumes(package, name, options):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(16, 32))
    optimizer = build(package, name, options, weight)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    scale_weight_decay(optimizer)
    torch.testing.assert_close(decayed(optimizer, scheduler, weight, 0, 3), weight.detach(), rtol=1e-5, atol=1e-6)

    resumed = torch.nn.Parameter(weight.detach().clone())
    other = build(package, name, options, resumed)
    scale_weight_decay(other)
    again = CosineAnnealingLR(other, STEPS)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    again.load_state_dict(scheduler.state_dict())
    torch.testing.assert_close(decayed(other, again, resumed, 3, STEPS), resumed.detach(), rtol=1e-5, atol=1e-6)
    assert float(other.param_groups[0]["weight_decay"]) < LAMBDA


@pytest.mark.parametrize(("package", "name", "options"), cases(REFUSED))
def test_other_decay_is_refused(package, name, options):
    optimizer = build(package, name, options, torch.nn.Parameter(torch.ones(4, 4)))
    with pytest.raises(ValueError, match="does not shrink weights by lr"):
        scale_weight_decay(optimizer)
