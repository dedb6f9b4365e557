"""The chunked cross-entropy equals the plain one, and holds one chunk's logits."""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from muonsw.lab.model import cross_entropy
from muonsw.lab.model import loss as module


def problem(tokens=23, width=8, vocab=31, dtype=torch.float64):
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    return x, weight, torch.randint(vocab, (tokens,))


def plain(x, weight, targets, scale):
    return functional.cross_entropy(x @ weight.T * scale, targets)


@pytest.mark.parametrize(("chunk", "scale"), [(1, 0.25), (4, 1.0), (100, 0.25)])
def test_equals_the_plain_one_in_value_and_gradient(chunk, scale, monkeypatch):
    monkeypatch.setattr(module, "CPU_CHUNK_TOKENS", chunk)
    x, weight, targets = problem()
    ours = cross_entropy(x, weight, targets, scale=scale)
    expected = plain(x, weight, targets, scale)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=0)
    # through something after the loss, so that the outer gradient is not one
    gradients, expected = (torch.autograd.grad((3 * loss).exp(), (x, weight)) for loss in (ours, expected))
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-13)


def test_second_derivatives_are_refused_rather_than_wrong():
    x, weight, targets = problem()
    (slope,) = torch.autograd.grad(cross_entropy(x, weight, targets).square(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.square().sum().backward()


def test_no_tensor_is_larger_than_one_chunk_of_logits(monkeypatch):
    monkeypatch.setattr(module, "CPU_CHUNK_TOKENS", 16)
    x, weight, targets = problem(tokens=256, width=4, vocab=512)
    with Largest() as seen:
        cross_entropy(x, weight, targets).backward()
    assert seen.elements == 16 * 512


class Largest(TorchDispatchMode):
    """Keeps the size of the largest tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out
