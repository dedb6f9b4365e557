"""Clipping: what it changes for each algorithm, and what it leaves alone."""

import math

import pytest
import torch
from torch import nn

from muonsw import SGDSW, AdamWSW, MuonSW, Telemetry, clip_optimizer_grads_
from muonsw.addons import clipping
from muonsw.lab.diagnose import Findings


def model_and_gradients(spike=1.0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 8), nn.Linear(8, 8, bias=False), nn.RMSNorm(8), nn.Linear(8, 8, bias=False))
    for name, param in model.named_parameters():
        param.grad = torch.randn_like(param) * (spike if name == "0.weight" else 1.0)
    return model


def stepped(clip, spike):
    """Two steps, the second with a spike in the embedding's gradient; the matrices after it."""
    model = model_and_gradients()
    optimizer = MuonSW.for_model(model, lr=0.02, ns_dtype="float32")
    optimizer.step()
    torch.manual_seed(1)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    model[0].weight.grad *= spike
    clip(model, optimizer)
    optimizer.step()
    return model[1].weight.detach()


def test_a_spike_in_the_embedding_does_not_reach_the_matrices():
    """One norm for the whole model takes that batch out of every matrix's momentum; ours does not."""
    by_torch = {
        spike: stepped(lambda m, _: nn.utils.clip_grad_norm_(m.parameters(), 1.0), spike) for spike in (1.0, 1e4)
    }
    ours = {spike: stepped(lambda _, o: clip_optimizer_grads_(o, 1.0), spike) for spike in (1.0, 1e4)}
    assert torch.equal(ours[1.0], ours[1e4])
    assert (by_torch[1.0] - by_torch[1e4]).norm() > 0.1 * 0.02 * math.sqrt(8)


@pytest.mark.parametrize("cls", [AdamWSW, SGDSW])
def test_clipping_of_other_algorithms_matches_torch(cls):
    ours, theirs = model_and_gradients(5.0), model_and_gradients(5.0)
    optimizer = cls.for_model(ours, lr=0.01)
    norm = clip_optimizer_grads_(optimizer, 0.7)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs.parameters(), 0.7))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


def test_all_algorithms_can_be_clipped_by_one_norm():
    model = model_and_gradients()
    optimizer = MuonSW.for_model(model, lr=0.01)
    clip_optimizer_grads_(optimizer, 0.7, algorithms=("adamw", "sgd", "muon"))
    assert math.hypot(*(param.grad.norm().item() for param in model.parameters())) == pytest.approx(0.7, rel=1e-5)


def test_mistakes_are_named():
    model = model_and_gradients()
    optimizer = MuonSW.for_model(model, lr=0.01)
    with pytest.raises(ValueError, match=r"max_norm=0: must be"):
        clip_optimizer_grads_(optimizer, 0)
    with pytest.raises(TypeError, match="a collection of names"):
        clip_optimizer_grads_(optimizer, 1.0, algorithms="adamw")
    with pytest.raises(ValueError, match="unknown algorithm"):
        clip_optimizer_grads_(optimizer, 1.0, algorithms=["adagrad"])
    with pytest.raises(TypeError, match="use torch"):
        clip_optimizer_grads_(torch.optim.AdamW(model.parameters()), 1.0)


@pytest.mark.parametrize(("limit", "expected"), [(1e-3, 1.0), (1e6, 0.0)])
def test_telemetry_records_how_often_clipping_acts(limit, expected):
    model = model_and_gradients()
    optimizer = MuonSW.for_model(model, lr=0.01)
    findings = Findings()
    messages = []
    with Telemetry(optimizer, every=3, sink=lambda record: messages.extend(findings(record))) as telemetry:
        for _ in range(12):
            torch.manual_seed(0)
            for param in model.parameters():
                param.grad = torch.randn_like(param)
            clip_optimizer_grads_(optimizer, limit)
            optimizer.step()
    assert [record["clipped"] for record in telemetry.records] == [expected] * 5
    assert any("Gradient clipping acts on 100%" in text for text in messages) == (expected == 1.0)


def test_calls_in_a_graph_are_counted_at_each_replay():
    """A replay writes to the tensor that was used at capture, and calls no Python."""
    optimizer = MuonSW.for_model(model_and_gradients(), lr=0.02)
    clip_optimizer_grads_(optimizer, 1e-3)
    used_by_the_graph = clipping._counts[optimizer]
    assert (clipping.clipped_share(optimizer), clipping.clipped_share(optimizer)) == (1.0, None)
    for clipped in (True, False, False, False):
        used_by_the_graph.add_(torch.tensor([clipped, True]))
    assert clipping.clipped_share(optimizer) == 0.25
