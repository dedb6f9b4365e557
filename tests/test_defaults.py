"""torch's default dtype and default device are the user's: no step, state or measurement depends on them."""

from functools import cache

import pytest
import torch
from torch import nn

from muonsw import MuonSW, Telemetry
from muonsw.decay import DECAY_RULES
from tests.common.problems import OPTIMIZERS, RULE_OPTIONS, matrices, set_gradients

SHAPES = [(12, 8), (8, 16), (3, 6, 8)]


@pytest.fixture(params=[torch.bfloat16, torch.float64], ids=str)
def other_defaults(request):
    """A switch that sets the defaults to something that nothing here should be made with."""

    def switch():
        torch.set_default_device("meta")
        torch.set_default_dtype(request.param)

    yield switch
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def parameters(algorithm, dtype=torch.float32):
    params = matrices(*SHAPES, dtype=dtype)
    return params, {"params": params, "algorithm": algorithm, "momentum": 0.9, "matrix": "stack"}


def gradients(params, steps):
    """Made beforehand, with the usual defaults."""
    found = []
    for step in range(steps):
        set_gradients(params, step)
        found.append([param.grad for param in params])
    return found


def trained(algorithm, switch=None, *, dtype=torch.float32, steps=4, **options):
    params, group = parameters(algorithm, dtype)
    every = gradients(params, steps)
    if switch is not None:
        switch()
    optimizer = MuonSW([group], lr=0.05, ns_dtype="float32", **{"weight_decay": 0.01, "peak_lr": 0.05, **options})
    telemetry = Telemetry(optimizer, every=2, spectral_norm=True)
    for grads in every:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.step()
    optimizer.summary()
    record = telemetry.last["all"]
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    return [t.detach() for p in params for t in (p, *optimizer.state[p].values())], record


@cache
def with_usual_defaults(algorithm, **options):
    return trained(algorithm, **options)


def assert_same(found, expected):
    for a, b in zip(found[0], expected[0], strict=True):
        assert a.device == b.device
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert found[1] == expected[1]


@pytest.mark.parametrize("decay", DECAY_RULES)
def test_steps_are_the_same_whatever_the_defaults(decay, other_defaults):
    options = {"decay": decay, **RULE_OPTIONS.get(decay, {})}
    assert_same(trained("sgd", other_defaults, **options), with_usual_defaults("sgd", **options))


@pytest.mark.parametrize("options", [{}, {"norm": "target"}, {"norm": "hyperball"}, {"cautious": True}], ids=str)
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_so_are_those_of_every_algorithm_and_norm(algorithm, options, other_defaults):
    assert_same(trained(algorithm, other_defaults, **options), with_usual_defaults(algorithm, **options))


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_so_are_those_of_low_precision(algorithm, other_defaults):
    options = {"dtype": torch.bfloat16}
    assert_same(trained(algorithm, other_defaults, **options), with_usual_defaults(algorithm, **options))


def test_a_rate_of_low_precision_is_computed_with_in_float32():
    """What `lr=torch.tensor(0.0625)` is under a default of bfloat16, which holds this number and not its square."""

    def run(dtype):
        params, group = parameters("sgd")
        optimizer = MuonSW([group], lr=torch.tensor(0.0625, dtype=dtype), weight_decay=0.3, peak_lr=0.07)
        for grads in gradients(params, 3):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()
        return [param.detach() for param in params]

    for a, b in zip(run(torch.bfloat16), run(torch.float32), strict=True):
        assert torch.equal(a, b)


def test_a_saved_count_of_steps_is_not_rounded(other_defaults):
    """Older states count in plain numbers; bfloat16 holds none of the odd ones above 256."""
    (param,) = matrices((4, 4))
    theirs = torch.optim.AdamW([param], lr=0.01)
    param.grad = torch.zeros(4, 4)
    theirs.step()
    saved = theirs.state_dict()
    saved["state"][0]["step"] = 1001.0
    ours = OPTIMIZERS["adamw"]([nn.Parameter(param.detach().clone())], lr=0.01, peak_lr=0.01)
    other_defaults()
    ours.load_state_dict(saved)
    step = ours.state[ours.param_groups[0]["params"][0]]["step"]
    assert (float(step), step.dtype, step.device.type) == (1001.0, torch.float32, "cpu")
