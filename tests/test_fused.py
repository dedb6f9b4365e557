"""Updates that one kernel makes whole are the updates that `apply` makes of directions."""

import pytest
import torch

from muonsw import DECAY_RULES, SGDSW, AdamWSW, Telemetry
from tests.common.problems import RULE_OPTIONS, assert_same, matrices, run

BUILD = {
    "adamw": lambda p, **o: AdamWSW(p, lr=0.05, **o),
    "sgd": lambda p, **o: SGDSW(p, lr=0.05, **o),
    "momentum": lambda p, **o: SGDSW(p, lr=0.05, momentum=0.9, **o),
    "nesterov": lambda p, **o: SGDSW(p, lr=0.05, momentum=0.9, nesterov=True, **o),
    "ema": lambda p, **o: SGDSW(p, lr=0.05, momentum=0.9, momentum_form="ema", **o),
}
every = pytest.mark.parametrize("name", BUILD)
SHAPES = [(4, 6), (7,), (2, 3, 5)]


def is_fused(optimizer, params, monkeypatch):
    """Whether the next step leaves directions out."""
    applied = []
    with monkeypatch.context() as patch:
        patch.setattr("muonsw.step.apply_update", lambda *_: applied.append(True))
        run(optimizer, params, 1, start=1)
    return not applied


def plain(monkeypatch):
    """Take kernels away."""
    for module in ("adamw", "sgd"):
        monkeypatch.setattr(f"muonsw.algorithms.{module}.suits_torch", lambda *_: False)


@every
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", DECAY_RULES)
def test_every_rule_is_the_same_with_and_without(name, decay, maximize, monkeypatch):
    options = {"decay": decay, "weight_decay": 0.01, "maximize": maximize, **RULE_OPTIONS.get(decay, {})}

    def trained():
        params = matrices(*SHAPES, dtype=torch.float64)
        run(BUILD[name](params, **options), params, 5, schedule=lambda t: 0.05 / (1 + t))
        return params

    fused = trained()
    plain(monkeypatch)
    for a, b in zip(fused, trained(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


@every
def test_backward_through_weights_that_were_stepped_raises(name):
    """As with torch's own optimizers; else the gradient would be of weights that the forward pass never saw."""
    params = matrices(*SHAPES)
    loss = sum(param.square().sum() for param in params)
    run(BUILD[name](params), params, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every
def test_what_torch_cannot_do_takes_our_path(name, monkeypatch):
    for dtype, options, expected in [
        (torch.float32, {}, True),
        (torch.float64, {}, True),
        (torch.bfloat16, {}, False),
        (torch.float32, {"cautious": True}, False),
        (torch.float32, {"state_dtype": "bfloat16"}, True),
    ]:
        params = matrices(*SHAPES, dtype=dtype)
        optimizer = BUILD[name](params, **options)
        run(optimizer, params, 1)
        assert is_fused(optimizer, params, monkeypatch) == expected, (dtype, options)
    turned = [torch.nn.Parameter(torch.randn(6, 4).mT)]
    optimizer = BUILD[name](turned)
    run(optimizer, turned, 1)
    assert not is_fused(optimizer, turned, monkeypatch)


@every
def test_a_learning_rate_of_zero_moves_nothing_and_advances_the_state(name):
    params = matrices(*SHAPES)
    optimizer = BUILD[name](params, weight_decay=0.1)
    run(optimizer, params, 2)
    before = [p.detach().clone() for p in params]
    run(optimizer, params, 1, start=2, schedule=lambda _: 0.0)
    assert_same([p.detach() for p in params], before)
    if name == "adamw":
        assert optimizer.state[params[0]]["step"] == 3


@every
def test_telemetry_sees_the_fused_update_and_leaves_it_alone(name, monkeypatch):
    def trained(telemetry):
        params = matrices(*SHAPES)
        optimizer = BUILD[name](params, weight_decay=0.1)
        watcher = Telemetry(optimizer, every=1) if telemetry else None
        run(optimizer, params, 3)
        return params, watcher

    (alone, _), (watched, fused) = trained(False), trained(True)
    assert_same(alone, watched)
    plain(monkeypatch)
    _, expected = trained(True)
    for a, b in zip(fused.records, expected.records, strict=True):
        for key, value in b["all"].items():
            assert a["all"][key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), key
