"""Diagnosis of weights that were really trained, recorded by the library's own telemetry."""

import json
import math

import pytest
import torch
from torch import nn

from muonsw import MuonSW
from muonsw.lab.diagnose.diagnosis import diagnose
from muonsw.lab.runs import load_run
from muonsw.telemetry import Telemetry

STEPS, WIDTH = 240, 16
BETA = 0.8


def train(folder, *, decay, every=1, lam=2.0, lr=0.02):
    """A small normalized network on noisy targets, with a cosine to a tenth; momentum is short against the run."""
    torch.manual_seed(0)
    linear, normalize = (lambda: nn.Linear(WIDTH, WIDTH, bias=False)), nn.RMSNorm(WIDTH, elementwise_affine=False)
    model = nn.Sequential(linear(), normalize, linear(), normalize)
    optimizer = MuonSW.for_model(model, lr=lr, weight_decay=lam, decay=decay, momentum=BETA)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: 0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * t / STEPS))
    )
    records = []
    telemetry = Telemetry(optimizer, every=every, model=model, sink=records.append)
    for step in range(1, STEPS + 1):
        inputs = torch.randn(16, WIDTH)
        loss = (model(inputs) - inputs.flip(1) - torch.randn(16, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        records.append({"kind": "train", "step": step, "loss": loss.item()})
    assert telemetry.step == STEPS
    folder.mkdir()
    settings = {"algorithm": "muon", "decay": decay, "weight_decay": lam, "lr": lr, "momentum": BETA}
    (folder / "config.json").write_text(json.dumps({"steps": STEPS, "optimizer": settings}), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    (folder / "result.json").write_text("{}", encoding="utf-8")
    return diagnose(load_run(folder))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    return {decay: train(folder / decay, decay=decay) for decay in ("constant", "scaled")}


@pytest.mark.parametrize("decay", ["constant", "scaled"])
def test_the_recursion_explains_every_step_of_a_real_run(trained, decay):
    history = trained[decay].history
    assert history.norm is not None
    assert history.tracking is not None
    assert len(history.norm) == STEPS
    # An identity: what is left is the rounding of float32 weights, 6e-8 of them in each step at most.
    assert history.tracking.predicted.tolist() == pytest.approx(history.norm.r.tolist(), rel=STEPS * 6e-8)
    assert history.lam == pytest.approx(2.0, rel=1e-5)
    assert history.momentum == BETA


def test_both_rules_part_and_are_reported_apart(trained):
    constant, scaled = trained["constant"], trained["scaled"]
    found = {rule: {finding.rule for finding in one.findings} for rule, one in trained.items()}
    assert "collapsing" in found["constant"]
    assert "collapsing" not in found["scaled"]
    assert {"unexplained-norm", "diverging", "rounding"}.isdisjoint(found["constant"] | found["scaled"])
    assert scaled.history.last("weight_rms") > 1.5 * constant.history.last("weight_rms")
    collapse = next(finding for finding in constant.findings if finding.rule == "collapsing")
    # What the constant run alone says about scaled decay, against the run that used it.
    assert collapse.numbers["held_norm"] == pytest.approx(scaled.history.last("weight_rms"), rel=0.25)
