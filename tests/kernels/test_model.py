"""The kernels of the lab's model equal their torch versions."""

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="Triton is not installed")

from muonsw.lab.model import kernels
from muonsw.lab.model.layers import _add_choices

# The interpreter truncates where a GPU rounds: an error of one unit in the last place instead of half.
PRECISIONS = [(torch.float32, 1e-6), (torch.bfloat16, 2.0**-7)]


@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS, ids=str)
@pytest.mark.parametrize("columns", [1, 50, 5000])
def test_losses_and_their_gradients_equal_torchs(columns, dtype, bound, device):
    logits = (30 * torch.randn(7, columns)).to(device, dtype)
    targets = torch.randint(columns, (7,)).to(device)
    exact = logits.double().requires_grad_()
    expected = functional.cross_entropy(0.5 * exact, targets, reduction="none")
    (gradient,) = torch.autograd.grad(expected.sum(), exact)
    losses, before = torch.full((7,), torch.nan, device=device), logits.clone()
    kernels.softmax_losses_(logits, targets, losses, 0.5, None)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits, before), "without a gradient logits do not change"
    kernels.softmax_losses_(logits, targets, losses.fill_(torch.nan), 0.5, 0.5 * 3)
    torch.testing.assert_close(losses.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), 3 * gradient, rtol=bound, atol=bound / 100)


def test_a_non_finite_logit_affects_only_its_own_loss(device):
    logits = torch.randn(3, 40).to(device)
    logits[1, 5] = torch.nan
    losses = torch.empty(3, device=device)
    kernels.softmax_losses_(logits, torch.zeros(3, dtype=torch.int64, device=device), losses, 1.0, 1.0)
    assert losses.isfinite().tolist() == [True, False, True]
    assert logits[[0, 2]].isfinite().all()


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), PRECISIONS, ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "width"), [(21, 2, 300), (8, 1, 256), (3, 3, 5)])
def test_rows_of_the_chosen_experts_are_added(tokens, top_k, width, dtype, bound, weighted, device):
    rows, places = torch.randn(tokens * top_k, width).to(device, dtype), torch.randperm(tokens * top_k).to(device)
    weights = torch.rand(tokens, top_k).to(device) if weighted else None
    actual = kernels.add_rows(rows, places.view(tokens, top_k), weights)
    expected = _add_choices(rows.double(), places.view(tokens, top_k), None if weights is None else weights.double())
    torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=bound)
