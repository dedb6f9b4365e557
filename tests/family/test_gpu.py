"""Algorithms with factors on a CUDA device. Run by `make test-gpu`."""

import pytest
import torch
from torch import nn

from muonsw import MuonSW, machine
from muonsw.algorithms.kl_shampoo import inverse_sqrt
from tests.common.cuda import no_waiting
from tests.common.problems import assert_same, clones, matrices, set_gradients
from tests.family.algorithms import OPTIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.gpus(), reason="needs a CUDA device"),
]
every_algorithm = pytest.mark.parametrize("name", OPTIONS)
SHAPES = [(64, 64), (32, 32), (64, 64)]


def trained(name, steps, *, device, dtype=torch.float32, **options):
    params = [nn.Parameter(param.detach().to(device)) for param in matrices(*SHAPES, dtype=dtype)]
    optimizer = MuonSW([{"params": params, **OPTIONS[name], **options}], lr=0.01, weight_decay=0.1)
    for step in range(steps):
        feed(params, step)
        optimizer.step()
    return params, optimizer


def feed(params, step):
    """The gradients of `set_gradients`, moved."""
    twins = [nn.Parameter(torch.empty(param.shape, dtype=param.dtype)) for param in params]
    set_gradients(twins, step)
    for param, twin in zip(params, twins, strict=True):
        param.grad = twin.grad.to(param.device)


@every_algorithm
def test_steps_are_those_of_a_cpu(name):
    here, _ = trained(name, 6, device="cuda", dtype=torch.float64)
    there, _ = trained(name, 6, device="cpu", dtype=torch.float64)
    for a, b in zip(here, there, strict=True):
        assert (a.detach().cpu() - b.detach()).norm() < 1e-7 * b.detach().norm()


@every_algorithm
def test_tf32_reaches_no_factor(name):
    options = {"ns_dtype": "float32"} if name == "kl_shampoo" else {}
    expected, _ = trained(name, 5, device="cuda", **options)
    torch.set_float32_matmul_precision("high")
    try:
        found, _ = trained(name, 5, device="cuda", **options)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert_same(found, expected)


@every_algorithm
def test_a_step_without_a_refresh_waits_for_nothing(name):
    frequency = {} if name in ("kl_shampoo", "asgo") else {"precondition_frequency": 100}
    params, optimizer = trained(name, 2, device="cuda", **frequency)
    feed(params, 2)
    with no_waiting():
        optimizer.step()


@every_algorithm
def test_a_gradient_that_is_not_finite_changes_nothing(name):
    params, optimizer = trained(name, 2, device="cuda")
    weights = clones(params)
    state = [value.clone() for values in optimizer.state.values() for value in values.values()]
    feed(params, 2)
    params[1].grad[0, 0] = torch.nan
    optimizer.step()
    with pytest.warns(match="skipped"):
        optimizer.check()
    assert_same(params, weights)
    assert_same([value for values in optimizer.state.values() for value in values.values()], state)


def test_roots_in_float16_are_near_those_in_float32():
    A = torch.randn(4, 256, 512, device="cuda")
    S = A @ A.mT / 512 + 0.01 * torch.eye(256, device="cuda")
    wide, low = inverse_sqrt(S, torch.float32), inverse_sqrt(S, torch.float16)
    assert (low - wide).norm() < 30 * 2**-11 * wide.norm()


def test_asgo_is_replayed():
    eager, _ = trained("asgo", 12, device="cuda")
    params = [nn.Parameter(param.detach().cuda()) for param in matrices(*SHAPES)]
    optimizer = MuonSW([{"params": params, **OPTIONS["asgo"]}], lr=0.01, weight_decay=0.1, replay=True)
    for param in params:
        param.grad = torch.zeros_like(param)
    for step in range(12):
        twins = [nn.Parameter(torch.empty(param.shape)) for param in params]
        set_gradients(twins, step)
        for param, twin in zip(params, twins, strict=True):
            param.grad.copy_(twin.grad)
        optimizer.step()
    for a, b in zip(params, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
