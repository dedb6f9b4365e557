"""Fused updates equal those that `apply` makes from directions."""

import pytest
import torch

from muonsw import DECAY_RULES, SGDSW, AdamWSW
from tests.common.problems import RULE_OPTIONS, matrices, run

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
    """Whether the next step computes no directions."""
    applied = []
    with monkeypatch.context() as patch:
        patch.setattr("muonsw.step.apply_update", lambda *_: applied.append(True))
        run(optimizer, params, 1, start=1)
    return not applied


@every
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("decay", DECAY_RULES)
def test_every_decay_rule_is_the_same_fused_or_not(name, decay, maximize):
    options = {"decay": decay, "weight_decay": 0.01, "maximize": maximize, **RULE_OPTIONS.get(decay, {})}

    def trained(**more):
        params = matrices(*SHAPES, dtype=torch.float64)
        run(BUILD[name](params, **options, **more), params, 5, schedule=lambda t: 0.05 / (1 + t))
        return params

    for a, b in zip(trained(), trained(fused=False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


@every
def test_backward_through_weights_that_were_stepped_raises(name):
    """As with torch's optimizers: the gradient would belong to weights that the forward pass never saw."""
    params = matrices(*SHAPES)
    loss = sum(param.square().sum() for param in params)
    run(BUILD[name](params), params, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@every
def test_unsupported_options_are_not_fused(name, monkeypatch):
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
