"""Findings while training: said when they hold, rarely, and not otherwise."""

import pytest
import torch
from torch import nn

from muonsw import AdamWSW, MuonSW, Telemetry
from muonsw.lab.diagnose.live import AGAIN, Findings
from muonsw.lab.theory.schedule import lr_scheduler, warmup_cosine


def record(step, lr, norm, *, rule="constant", skipped=0, relative=0.001, arrived=1.0):
    update = relative * norm
    values = {"weight_rms": norm, "lr": lr, "update_rms": update, "relative_update": relative, "decay": 0.0}
    values |= {"alignment_update": 0.0, "applied_rms": arrived * update, "defect": 0.9}
    groups = [{"role": "experts", "rule": rule, "decay": 0.001}]
    return {"step": step, "roles": {"experts": values}, "skipped": skipped, "groups": groups}


def falling(rule, power):
    """The norm follows this power of the learning rate, which falls to a hundredth."""
    return [record(step, lr := 1.0 - 0.99 * step / 100, lr**power, rule=rule) for step in range(1, 101)]


@pytest.mark.parametrize(("rule", "power", "said"), [("constant", 0.5, 1), ("constant", 0.0, 0), ("scaled", 0.5, 0)])
def test_decay_that_collapses_the_experts_is_reported_once(rule, power, said):
    findings = Findings()
    texts = [text for entry in falling(rule, power) for text in findings(entry)]
    assert len(texts) == said == len(findings.history)
    assert all("constant decay is collapsing the weights of role 'experts'" in text for text in texts)


def test_a_norm_that_only_started_too_large_is_not_reported():
    """It falls while the learning rate is high, and not any more once that has halved."""
    findings = Findings()
    for step in range(1, 101):
        lr = 1.0 if step < 60 else 0.3
        findings(record(step, lr, max(3.0 - step / 20, 1.0)))
    assert not findings.history


def test_what_a_norm_lost_before_the_learning_rate_came_down_is_no_collapse():
    """From 3 to 1 at the peak, and to 0.85 after it."""
    findings = Findings()
    for step in range(1, 101):
        lr = 1.0 if step < 60 else 0.3
        findings(record(step, lr, max(3.0 - step / 20, 1.0) if step < 65 else 0.85))
    assert not findings.history


@pytest.mark.parametrize(
    ("options", "words"),
    [({"relative": 0.2}, "updates of role 'experts' are 20%"), ({"arrived": 0.5}, "move by 50% of what is intended")],
    ids=["large", "rounding"],
)
def test_what_holds_over_several_samples_is_reported_and_repeated_rarely(options, words):
    findings = Findings()
    reported = [step for step in range(1, 401) if any(words in t for t in findings(record(step, 1.0, 1.0, **options)))]
    assert reported == [5, 5 * AGAIN]
    assert not [text for step in range(1, 401) for text in Findings()(record(step, 1.0, 1.0))]


@pytest.mark.filterwarnings("ignore:rounding='nearest' loses")
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_only_rounding_to_nearest_loses_what_does_not_arrive(rounding):
    """Few elements of a gain near 1 change at all at a time, and over many updates they move as far as intended."""
    model = nn.RMSNorm(8).bfloat16()
    findings = Findings()
    optimizer = AdamWSW.for_model(model, lr=1e-5, weight_decay=0.0, rounding=rounding)
    with Telemetry(optimizer, every=1, sink=findings):
        for _ in range(20):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
    assert any("is lost in rounding" in text for _, text in findings.history) == (rounding == "nearest")


def test_a_real_run_with_moderate_updates_is_left_in_peace():
    model = nn.Sequential(nn.Linear(32, 32), nn.RMSNorm(32), nn.Linear(32, 32))
    optimizer = MuonSW.for_model(model, lr=0.002, weight_decay=0.1)
    scheduler = lr_scheduler(optimizer, warmup_cosine, total_steps=60, warmup_steps=6)
    findings = Findings()
    with Telemetry(optimizer, every=2, sink=findings):
        for _ in range(60):
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert findings.history == []
