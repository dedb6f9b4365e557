"""A recipe says what decay will do, and it does that."""

import math

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from muonsw.lab.recipes import recipe
from muonsw.lab.theory.schedule import lr_scheduler, warmup_cosine


def decay_of_a_run(found, steps, warmup):
    """The share of a weight that decay takes when nothing else moves it."""
    model = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 4))
    optimizer = MuonSW.for_model(model, **found.options)
    scheduler = lr_scheduler(optimizer, warmup_cosine, total_steps=steps, warmup_steps=warmup, final_fraction=0.1)
    before = model[1].weight.norm().item()
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()
        scheduler.step()
    return 1 - model[1].weight.norm().item() / before


@pytest.mark.parametrize("finetuning", [False, True])
def test_decay_takes_what_the_recipe_says(finetuning):
    found = recipe(lr=0.01, weight_decay=0.2, steps=200, warmup_steps=20, finetuning=finetuning)
    # prod(1 - phi) and exp(-sum(phi)) differ by sum(phi^2) / 2, at most phi_max sum(phi) / 2.
    slack = 0.01 * 0.2 * 0.4
    assert decay_of_a_run(found, 200, 20) == pytest.approx(found.decayed, abs=slack)
    assert not finetuning or found.decayed == pytest.approx(0.05)


def test_the_lambda_of_equal_total_takes_what_constant_decay_took():
    steps, lr, lam = 1000, 0.01, 0.1
    rates = [lr * warmup_cosine(t, total_steps=steps, warmup_steps=100, final_fraction=0.1) for t in range(steps)]
    found = recipe(lr=lr, weight_decay=lam, steps=steps, warmup_steps=100)
    assert found.equal_total * math.fsum(rate**2 / lr for rate in rates) == pytest.approx(lam * math.fsum(rates))


def test_muons_entries_move_as_adamws_do():
    """The reason given for keeping the rate: updates of RMS 0.2 lr, to what the orthogonalizer leaves open."""
    weight = nn.Parameter(torch.zeros(64, 32))
    weight.grad = torch.randn(64, 32)
    options = {**recipe(lr=0.01, weight_decay=0.0, steps=10).options}
    options.pop("adamw")
    MuonSW([weight], **options, orthogonalizer="exact").step()
    # polar(M) of 64 x 32 has 32 singular values of 1: Frobenius norm sqrt(32), RMS sqrt(32 / 2048), times 0.2 sqrt(64).
    assert weight.square().mean().sqrt().item() == pytest.approx(0.2 * 0.01, rel=1e-4)


def test_reasons_follow_the_numbers():
    assert "decay hardly acts" in str(recipe(lr=1e-4, weight_decay=0.1, steps=1000))
    assert "decay hardly acts" not in str(recipe(lr=1e-2, weight_decay=0.1, steps=10_000))
    assert "not slow against momentum" in str(recipe(lr=0.05, weight_decay=0.5, steps=1000))
    assert "takes 5% of them" in str(recipe(lr=1e-3, weight_decay=0.1, steps=10_000, finetuning=True))
    short = recipe(lr=1e-5, weight_decay=0.01, steps=100, finetuning=True)
    assert short.weight_decay == 0.01


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 0}, "lr=0"),
        ({"weight_decay": -1}, "weight_decay=-1"),
        ({"steps": 0}, "steps=0"),
        ({"lr": 3.0, "weight_decay": 1.0}, "more than the whole weight"),
    ],
    ids=str,
)
def test_wrong_numbers(given, message):
    with pytest.raises(ValueError, match=message):
        recipe(**{"lr": 0.01, "weight_decay": 0.1, "steps": 100, **given})


@pytest.mark.parametrize("new_batch", [2**16, 2**18, 2**20])
def test_another_batch_sees_the_same_data_and_decays_as_much(new_batch):
    """Without clipping of lambda by fine-tuning; sums differ by the steps that a schedule is cut into, under 1e-5."""
    given = {"lr": 3e-3, "weight_decay": 0.1, "steps": 8_000, "warmup_steps": 400, "batch": 2**18}
    same, other = recipe(**given), recipe(**given, new_batch=new_batch)
    factor = new_batch / 2**18
    assert other.batch * other.steps == same.batch * same.steps
    assert other.warmup_steps * other.batch == same.warmup_steps * same.batch
    assert other.lr == pytest.approx(same.lr * math.sqrt(factor))
    assert other.decayed == pytest.approx(same.decayed, rel=1e-5)
    assert other.adamw["lr"] == other.lr


def test_a_recipe_says_what_it_does_about_the_batch():
    given = {"lr": 1e-3, "weight_decay": 0.1, "steps": 1000}
    assert "batch and steps stay:" in str(recipe(**given))
    assert "512 an update, 512,000 in all" in str(recipe(**given, batch=512))
    assert "was not measured here" in str(recipe(**given, batch=512, new_batch=1024))
    assert "tune the rate again" in str(recipe(**given, batch=512, new_batch=512 * 16))
    assert "tune the rate again" not in str(recipe(**given, batch=512, new_batch=512 * 8))
    with pytest.raises(ValueError, match="new_batch needs batch"):
        recipe(**given, new_batch=512)
    with pytest.raises(ValueError, match="batch=0"):
        recipe(**given, batch=0)


def test_a_batch_so_large_that_decay_would_take_the_whole_weight_is_refused():
    given = {"lr": 0.5, "weight_decay": 0.5, "steps": 1000, "batch": 1}
    assert recipe(**given, new_batch=4).lr == 1.0
    with pytest.raises(ValueError, match=r"new_batch=8: lr \* weight_decay grows to 2"):
        recipe(**given, new_batch=8)


def test_a_recipe_is_for_models_of_matrices_alone_too():
    alone = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    for found in (recipe(lr=0.01, weight_decay=0.1, steps=100), recipe(0.01, 0.1, 100, batch=2, new_batch=8)):
        optimizer = MuonSW.for_model(alone, **found.options)
        assert optimizer.param_groups[0]["lr"] == found.lr
    mixed = nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    found = recipe(lr=0.01, weight_decay=0.1, steps=100, betas=(0.9, 0.99))
    for group in MuonSW.for_model(mixed, **found.options).param_groups:
        assert group["algorithm"] == "muon" or (group["betas"], group["lr"]) == ((0.9, 0.99), 0.01)
