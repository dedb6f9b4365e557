"""The check for finite gradients and its flag, which the host does not wait for."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from muonsw import AdamWSW, nonfinite
from tests.common.problems import (
    OPTIMIZERS,
    assert_same,
    clones,
    flag_on_device,
    matrices,
    run,
    set_gradients,
    step_with_nan,
)

BAD = [float("nan"), float("inf"), float("-inf")]


def check_by_amp(grads):
    return not bool(nonfinite._bad_by_amp(torch.zeros(()), nonfinite._by_dtype(grads)))


def check_on_host(grads):
    items = [SimpleNamespace(grad=grad) for grad in grads]
    return nonfinite.finite_flag([SimpleNamespace(device=torch.device("cpu"), items=items)])


def check_exactly(grads):
    return bool(nonfinite.all_finite(grads))


@pytest.mark.parametrize("check", [check_by_amp, check_on_host, check_exactly])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_single_bad_element_is_detected_anywhere(check, dtype, bad):
    grads = [torch.randn(3, 5), torch.randn(()), torch.empty(0, 4), torch.randn(70).to(dtype), torch.randn(70, 70)]
    assert check(grads)
    for grad in (grad for grad in grads if grad.numel()):
        for place in (0, grad.numel() - 1):
            before = grad.view(-1)[place].clone()
            grad.view(-1)[place] = bad
            assert not check(grads)
            grad.view(-1)[place] = before
    assert check(grads)


@pytest.mark.parametrize("check", [check_by_amp, check_on_host, check_exactly])
def test_large_finite_gradients_pass_even_if_their_norm_overflows(check):
    for dtype in (torch.float32, torch.float16):
        grads = [torch.full(shape, torch.finfo(dtype).max).to(dtype) for shape in ((40, 40), (8, 8), (256, 257))]
        assert check(grads)
        grads[1][7, 7] = float("inf")
        assert not check(grads)


def test_empty_gradients_are_finite():
    assert check_on_host([])
    assert check_on_host([torch.empty(0)])


def test_the_mixed_precision_check_does_not_change_gradients():
    grad = torch.cat([torch.randn(100), torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3.4e38, *BAD])])
    before = grad.view(torch.int32).clone()
    assert not check_by_amp([grad])
    assert torch.equal(grad.view(torch.int32), before)


class Waits(TorchDispatchMode):
    """Counts how often a tensor's value is read on the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("algorithm", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_under_the_flag_reads_no_value_on_the_host(algorithm, dtype, monkeypatch):
    monkeypatch.setattr("muonsw.step.finite_flag", flag_on_device)
    params = matrices((6, 4), (4, 4), dtype=dtype)
    options = {"momentum": 0.9} if algorithm == "sgd" else {}
    optimizer = OPTIMIZERS[algorithm](params, lr=0.05, weight_decay=0.3, **options)
    run(optimizer, params, 2)
    set_gradients(params, 2)
    with Waits() as waits:
        optimizer.step()
    assert waits.count == 0
    with Waits() as waits:
        float(params[0].detach().sum())
    assert waits.count == 1  # the counter works


def test_adamw_under_the_flag_is_torchs_fused_step_bit_for_bit(monkeypatch):
    monkeypatch.setattr("muonsw.step.finite_flag", flag_on_device)
    ours = matrices((8, 8), (5,), (2, 3, 4))
    theirs = clones(ours)
    optimizer = AdamWSW(ours, lr=0.05, weight_decay=0.1, decay="constant", betas=(0.9, 0.99))
    torchs = torch.optim.AdamW(theirs, lr=0.05, weight_decay=0.1, betas=(0.9, 0.99), fused=True)
    for step in range(10):
        if step == 5:  # a step that is skipped leaves no trace
            step_with_nan(optimizer, ours, 99)
        run(optimizer, ours, 1, start=step)
        run(torchs, theirs, 1, start=step)
    assert_same(ours, theirs)
    assert optimizer.skipped_steps == 1
    for param, twin in zip(ours, theirs, strict=True):
        assert_same(optimizer.state[param], torchs.state[twin])
