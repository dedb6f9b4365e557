"""Megatron-Core as installed: its scheduler, which writes rate and decay into the groups at every step.

Its optimizer wrappers need CUDA, and the registry of new optimizers is not in the release; the guide says so.
"""

import pytest
import torch

pytest.importorskip("megatron.core")
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from muonsw import MuonSW, scale_weight_decay

LR, LAMBDA, STEPS = 0.02, 0.1, 8


def scheduler_of(optimizer, **options):
    defaults = {"init_lr": 0.0, "max_lr": LR, "min_lr": 0.1 * LR, "lr_warmup_steps": 2, "lr_decay_steps": STEPS}
    decay = {"start_wd": LAMBDA, "end_wd": LAMBDA, "wd_incr_steps": STEPS, "wd_incr_style": "constant"}
    return OptimizerParamScheduler(optimizer, lr_decay_style="cosine", **{**defaults, **decay, **options})


def megatrons_group(*params, **more):
    """A group with the keys that Megatron's factory gives it."""
    keys = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    return {"params": list(params), **keys, "max_lr": LR, "min_lr": 0.1 * LR, "default_config": True, **more}


def test_our_rule_under_its_scheduler_and_in_its_groups():
    weight, vector = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4))
    groups = [megatrons_group(weight), megatrons_group(vector, wd_mult=0.0, algorithm="adamw")]
    optimizer = MuonSW(groups, lr=LR, weight_decay=LAMBDA)
    scheduler = scheduler_of(optimizer)
    for _ in range(STEPS):
        for param in (weight, vector):
            param.grad = torch.zeros_like(param)  # so only decay moves the weights
        before, lr = weight.detach().clone(), optimizer.param_groups[0]["lr"]
        optimizer.step()
        torch.testing.assert_close(weight.detach(), before * (1 - LAMBDA * lr**2 / LR), rtol=1e-6, atol=0.0)
        scheduler.step(1)
    assert torch.equal(vector.detach(), torch.ones(4))
    assert optimizer.param_groups[0]["resolved_peak_lr"] == LR


def test_without_wd_mult_its_scheduler_decays_every_group():
    """Therefore the guide sets `wd_mult`."""
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 8))
    optimizer = MuonSW.for_model(model, lr=LR, weight_decay=LAMBDA)
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["wd_mult"] = group["weight_decay"] / LAMBDA
    scheduler_of(optimizer).step(1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == decays
    assert {*decays} == {0.0, LAMBDA}
    for group in optimizer.param_groups:
        del group["wd_mult"]
    scheduler_of(optimizer).step(1)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {LAMBDA}


@pytest.mark.parametrize("theirs", [torch.optim.AdamW, torch.optim.Muon])
def test_scaled_decay_survives_a_scheduler_that_writes_decay(theirs):
    """Megatron falls back to torch's AdamW where no fused one is installed."""
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = theirs([megatrons_group(weight)], lr=LR, weight_decay=LAMBDA)
    scheduler = scheduler_of(optimizer)
    scale_weight_decay(optimizer, "scaled")
    for _ in range(STEPS):
        weight.grad = torch.zeros_like(weight)
        before, lr = weight.detach().clone(), optimizer.param_groups[0]["lr"]
        optimizer.step()
        torch.testing.assert_close(weight.detach(), before * (1 - LAMBDA * lr**2 / LR), rtol=1e-6, atol=0.0)
        scheduler.step(1)
    assert optimizer.param_groups[0]["weight_decay"] == LAMBDA  # as the scheduler wrote it, until the next step
