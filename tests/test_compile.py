"""A compiled step is the same step."""

import pytest
import torch

from muonsw import NORM_RULES, AdamWSW, MuonSW
from tests.common.problems import eager_and_compiled, matrices, set_gradients


def trained(backend, tensor_lr, steps=5, dtype=torch.float32):
    params = matrices((8, 8), (4, 12), (12, 4), (8, 8), (5,), (3, 4, 4), dtype=dtype)
    lr = torch.tensor(0.05) if tensor_lr else 0.05
    groups = [
        {"params": params[:4]},
        {"params": params[4:5], "algorithm": "adamw"},
        {"params": params[5:], "matrix": "stack", "split_sizes": (2, 2), "cautious": True},
    ]
    optimizer = MuonSW(groups, lr=lr, weight_decay=0.3)
    step = optimizer.step if backend is None else torch.compile(optimizer.step, backend=backend)
    for t in range(steps):
        for group in optimizer.param_groups:
            if tensor_lr:
                group["lr"].fill_(0.05 / (1 + t))
            else:
                group["lr"] = 0.05 / (1 + t)
        set_gradients(params, t)
        step()
    return params, optimizer


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize("tensor_lr", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_traced_step_equals_the_eager_one(tensor_lr):
    expected, _ = trained(None, tensor_lr)
    params, optimizer = trained("aot_eager", tensor_lr)
    for a, b in zip(params, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert [g["resolved_peak_lr"] for g in optimizer.param_groups] == [pytest.approx(0.05)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORM_RULES)
def test_a_traced_step_keeps_to_norm_rules(norm):
    options = {"weight_decay": 0.3, "norm": norm, "ns_dtype": "float32"}
    build = lambda params: MuonSW(params, lr=torch.tensor(0.05), **options)  # noqa: E731
    eager, compiled, _ = eager_and_compiled(build, (8, 8), (4, 12), steps=3)
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_nothing_is_read_back_inside_a_traced_step():
    """Breaks where an error is undone, and where the host checks options and peaks; none that waits for a tensor."""
    torch._dynamo.utils.counters.clear()
    trained("eager", tensor_lr=True)
    counters = torch._dynamo.utils.counters
    assert not counters["unimplemented"]
    expected = ("qualname: _undone_on_error", "qualname: check")
    assert all(any(name in reason for name in expected) for reason in counters["graph_break"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_inductor_step_equals_the_eager_one(dtype):
    """Needs a C++ compiler, and a minute. Low-precision weights may differ by one rounding in each of five steps."""
    expected, _ = trained(None, tensor_lr=True, dtype=dtype)
    params, _ = trained("inductor", tensor_lr=True, dtype=dtype)
    for a, b in zip(params, expected, strict=True):
        if dtype == torch.bfloat16:
            assert ((a - b).abs() <= 5 * torch.finfo(dtype).eps * b.abs().max()).all()
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.slow
def test_rounding_is_left_as_it_is_written():
    """Inductor fuses away the casts that rounding is made of; so a compiled step calls it uncompiled."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def build(params):
        return MuonSW(params, lr=torch.tensor(0.05), weight_decay=0.3, rounding="stochastic")

    eager, compiled, _ = eager_and_compiled(build, (4, 12), (8, 8), backend=backend, steps=3, dtype=torch.bfloat16)
    for a, b in zip(compiled, eager, strict=True):
        assert ((a - b).abs() <= 3 * torch.finfo(a.dtype).eps * b.abs().max()).all()
    traced = " ".join(str(node.target) for graph in graphs for node in graph.graph.nodes)
    assert "bitwise" not in traced, "the noise of stochastic rounding is not computed in a graph"


@pytest.mark.parametrize(
    ("lr", "gradient", "error"),
    [(0.2, torch.nan, "holds infinities or NaNs"), (50.0, 1.0, "5 times the weight")],
    ids=["gradient", "decay"],
)
def test_a_traced_step_that_raises_leaves_no_peak(lr, gradient, error):
    """A running peak that stayed would weaken decay for the rest of the run."""
    results = []
    for backend in (None, "eager"):
        params = matrices((4, 3))
        optimizer = AdamWSW(params, lr=0.1, weight_decay=0.1, peak_lr="running_max", nonfinite="raise")
        step = optimizer.step if backend is None else torch.compile(optimizer.step, backend=backend)
        for t in range(3):
            set_gradients(params, t)
            optimizer.param_groups[0]["lr"] = lr if t == 1 else 0.1
            if t == 1:
                params[0].grad.mul_(gradient)
                with pytest.raises((ValueError, FloatingPointError), match=error):
                    step()
            else:
                step()
        group = optimizer.param_groups[0]
        assert (group["resolved_peak_lr"], group["highest_lr"]) == (0.1, 0.1)
        assert optimizer.summary().groups[0].lr == 0.1
        results += params
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)
