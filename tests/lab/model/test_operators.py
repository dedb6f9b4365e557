"""The GPU operators equal plain torch, compiled or not; here they run their torch versions, on any device."""

import pytest
import torch
from torch import library

from muonsw.lab.model import layers, loss

# torch's compiler instantiates autograd functions, which torch warns about
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def is_sound(operator, *arguments):
    """Whether an operator passes torch's checks: schema, fake version, autograd, and tracing with any shapes."""
    return set(library.opcheck(operator, arguments).values()) == {"SUCCESS"}


def both_ways(function, inputs, twin):
    """Outputs and gradients of a function, plain and traced by a compiler, and of its readable twin."""
    results = []
    for run in (function, torch.compile(function, backend="aot_eager", fullgraph=True), twin):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        outputs = run(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(1)
        directions = [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, directions)])
    return results


def test_the_operator_of_the_head_passes_the_checks_of_torch():
    x, head, targets = torch.randn(10, 4), torch.randn(9, 4), torch.arange(10) % 9
    for differentiate in (True, False):
        assert is_sound(loss._head_loss_on_gpu, x, head, targets, 2.0, 4, differentiate)


def test_tokens_that_visit_their_experts_return_weighted():
    x, weights = torch.randn(20, 6), torch.rand(20, 2)
    routes = layers.plan_routes(torch.randn(20, 5).topk(2).indices, 5)
    places = routes.places
    assert is_sound(layers.add_choices_on_gpu, torch.randn(40, 6), places, weights)
    assert is_sound(layers.add_choices_on_gpu, torch.randn(40, 6), places, None)

    def there_and_back(x, weights):
        rows = layers._CopyToExperts.apply(x, routes.order, places)
        return layers._Combine.apply(rows * rows.arctan(), weights, routes.order, places)

    def twin(x, weights):
        return x * x.arctan() * weights.sum(dim=1, keepdim=True)

    for result in (found := both_ways(there_and_back, [x, weights], twin))[:2]:
        for a, b in zip(result, found[2], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("sizes", "parts"), [((3, 0, 50, 11), 4), ((0, 0, 64, 0), 1)])
def test_grouped_experts_equal_those_one_by_one(sizes, parts, monkeypatch):
    """In bfloat16, as on a GPU: torch has a slow form of the same product for CPUs."""
    monkeypatch.setattr(layers, "row_parts", lambda _: parts)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    inputs = [torch.randn(sum(sizes), 16), torch.randn(4, 48, 16) / 4, torch.randn(4, 16, 24) / 5]
    inputs[0] = inputs[0].bfloat16()
    results = both_ways(
        lambda *x: layers._GroupedExperts.apply(*x, ends),
        inputs,
        lambda x, gate_up, down: layers.expert_by_expert(x.float(), gate_up, down, ends),
    )
    for result in results[:2]:
        for a, b in zip(result, results[2], strict=True):
            # bfloat16 keeps eight bits, and three roundings follow each other
            assert (a.float() - b.float()).norm() <= 3 * 2**-8 * b.float().norm()
