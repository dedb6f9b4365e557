"""The fast mixture of experts against a readable one, and the loss that balances it."""

import pytest
import torch

from muonsw.lab.model.layers import MoE, balance_loss
from tests.lab.model.small_models import reference_moe, small

# Rounding of float64 in sums of fewer than a thousand products.
EXACT = {"rtol": 1e-10, "atol": 1e-12}


def double_moe(config, seed=0):
    moe = MoE(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in moe.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) / param.shape[-1] ** 0.5)
    return moe


def assert_equals_reference(moe, x):
    weights = (moe.router.weight, moe.gate_up, moe.down)
    inputs = (x.requires_grad_(), *weights)
    fast = moe(x).x
    slow = reference_moe(x, *weights, moe.config.top_k, moe.router_multiplier)
    torch.testing.assert_close(fast, slow, **EXACT)
    direction = torch.randn_like(fast)
    actual, expected = (torch.autograd.grad(out, inputs, direction) for out in (fast, slow))
    torch.testing.assert_close(actual, expected, **EXACT)


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (4, 1), (3, 3)])
def test_same_outputs_and_gradients_as_the_reference(experts, top_k):
    moe = double_moe(small(experts=experts, top_k=top_k))
    assert_equals_reference(moe, torch.randn(2, 5, 16, dtype=torch.float64))


def test_the_router_works_in_float32_under_autocast():
    moe = double_moe(small()).float()
    x = torch.randn(1, 5, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, out = moe.router_logits(x.flatten(0, 1)), moe(x)
    assert torch.equal(logits, x[0] @ moe.router.weight.T * moe.router_multiplier)
    assert (logits.dtype, out.x.dtype, out.balance.dtype) == (torch.float32, torch.bfloat16, torch.float32)


def test_same_as_the_reference_when_an_expert_gets_no_token():
    moe = double_moe(small(experts=4))
    x = torch.randn(2, 5, 16, dtype=torch.float64).abs()
    with torch.no_grad():
        moe.router.weight[2] = -10.0  # all inputs are positive: never among the best two
        moe.router.weight[0] = -9.0
    moe(x).x.sum().backward()
    assert moe.gate_up.grad[[0, 2]].abs().max() == 0
    assert moe.down.grad[[1, 3]].abs().max() > 0
    assert_equals_reference(moe, x)


def test_balance_loss_is_a_quarter_at_balance_and_one_if_all_tokens_choose_the_same():
    even = torch.stack([torch.arange(64) % 8, (torch.arange(64) + 3) % 8], dim=1)
    assert balance_loss(torch.zeros(64, 8), even).item() == 0.25
    logits = torch.zeros(64, 8)
    logits[:, :2] = 50.0
    assert balance_loss(logits, logits.topk(2).indices).item() == pytest.approx(1.0)
