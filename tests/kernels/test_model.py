"""The kernels of the lab's model equal their torch twins."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed")

from muonsw.lab.model import kernels
from muonsw.lab.model.decoder import _rotated_heads, rotary_table
from muonsw.lab.model.layers import _add_choices, gated, plan_routes

# The interpreter cuts bits off where a GPU rounds: one unit in the last place instead of half.
PRECISIONS = [(torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)]


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS, ids=str)
@pytest.mark.parametrize("columns", [1, 50, 5000])
def test_losses_and_their_gradients(columns, dtype, bound, device):
    logits = (30 * torch.randn(7, columns)).to(device, dtype)
    targets = torch.randint(columns, (7,)).to(device)
    exact = logits.double().requires_grad_()
    expected = functional.cross_entropy(0.5 * exact, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    losses, kept = torch.full((7,), torch.nan, device=device), logits.clone()
    kernels.softmax_losses_(logits, targets, losses, 0.5, None)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, kept), "without a gradient the logits stay"
    kernels.softmax_losses_(logits, targets, losses.fill_(torch.nan), 0.5, 0.5 * 3)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), 3 * gradient, rtol=bound, atol=bound / 100)


def test_a_logit_that_is_not_finite_shows_in_its_loss_alone(device):
    logits = torch.randn(3, 40).to(device)
    logits[1, 5] = torch.nan
    losses = torch.empty(3, device=device)
    kernels.softmax_losses_(logits, torch.zeros(3, dtype=torch.int64, device=device), losses, 1.0, 1.0)
    assert losses.isfinite().tolist() == [True, False, True]
    assert logits[[0, 2]].isfinite().all()


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(600, 8, 2), (257, 6, 3), (40, 1, 1), (1000, 5, 1), (300, 40, 4)]
)
def test_choices_and_routes(tokens, experts, top_k, device):
    logits = torch.randn(tokens, experts).to(device)
    chosen, *routes = kernels.choose_experts(logits, top_k)
    assert torch.equal(chosen, logits.topk(top_k).indices)
    for found, expected in zip(routes, plan_routes(chosen, experts), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf, 0.0])
def test_every_row_gets_a_place_whatever_the_logits_are(value, device):
    logits = torch.full((300, 6), value, device=device)
    chosen, order, inverse, ends = kernels.choose_experts(logits, 2)
    assert int(chosen.min()) >= 0
    assert int(chosen.max()) < 6
    assert torch.equal(order.sort().values, torch.arange(600, device=device))
    assert torch.equal(order[inverse], torch.arange(600, device=device))
    assert int(ends[-1]) == 600


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS, ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(21, 2, 300), (8, 1, 256), (3, 3, 5)])
def test_rows_of_the_choices_are_added_up(tokens, top_k, width, dtype, bound, weighted, device):
    rows, places = torch.randn(tokens * top_k, width).to(device, dtype), torch.randperm(tokens * top_k).to(device)
    weights = torch.rand(tokens, top_k).to(device) if weighted else None
    found = kernels.add_rows(rows, places.view(tokens, top_k), weights)
    expected = _add_choices(rows.double(), places.view(tokens, top_k), None if weights is None else weights.double())
    torch.testing.assert_close(found.double(), expected, rtol=bound, atol=bound)


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS, ids=str)
def test_the_gate_and_its_gradient(dtype, bound, device):
    fused, grad = torch.randn(21, 600).to(device, dtype), torch.randn(21, 300).to(device, dtype)
    exact = fused.double().requires_grad_()
    expected = gated(exact)
    (gradient,) = torch.autograd.grad(expected, exact, grad.double())
    found, again = kernels.gate_backward(grad, fused)
    torch.testing.assert_close(kernels.gate(fused).double(), expected.detach(), rtol=bound, atol=bound)
    assert torch.equal(again, kernels.gate(fused))
    torch.testing.assert_close(found.double(), gradient, rtol=bound, atol=bound)


@pytest.mark.parametrize("layout", ["heads first", "positions first"])
@pytest.mark.parametrize(("heads", "head_dim"), [(3, 16), (1, 64), (5, 6)])
def test_heads_are_rotated_there_and_back(heads, head_dim, layout, device):
    qkv = torch.randn(2, 21, 3 * heads * head_dim).to(device).requires_grad_()
    table = tuple(part.float().to(device) for part in rotary_table(21, head_dim, 10000.0))
    expected = _rotated_heads(qkv, table)
    for found, part in zip(kernels.rotate_heads(qkv.detach(), *table), expected, strict=True):
        torch.testing.assert_close(found, part.detach(), rtol=1e-6, atol=1e-6)
    grads = [torch.randn(2, heads, 21, head_dim).to(device) for _ in range(3)]
    if layout == "positions first":
        grads = [grad.transpose(1, 2).contiguous().transpose(1, 2) for grad in grads]
    (gradient,) = torch.autograd.grad(expected, qkv, grads)
    torch.testing.assert_close(kernels.join_heads(*grads, *table), gradient, rtol=1e-6, atol=1e-6)
