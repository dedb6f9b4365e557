"""A compiled step is the same step."""

import pytest
import torch

from muonsw import MuonSW
from tests.common.problems import matrices, set_gradients


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


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_traced_step_equals_the_eager_one(tensor_lr):
    expected, _ = trained(None, tensor_lr)
    params, optimizer = trained("aot_eager", tensor_lr)
    for a, b in zip(params, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert [g["resolved_peak_lr"] for g in optimizer.param_groups] == [pytest.approx(0.05)] * 3


def test_nothing_is_read_back_inside_a_traced_step():
    """One break, where the host looks at the peak; none that waits for a tensor."""
    torch._dynamo.utils.counters.clear()
    trained("eager", tensor_lr=True)
    counters = torch._dynamo.utils.counters
    assert not counters["unimplemented"]
    assert all("_update_peaks" in reason for reason in counters["graph_break"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_inductor_step_equals_the_eager_one(dtype):
    """Needs a C++ compiler, and a minute."""
    expected, _ = trained(None, tensor_lr=True, dtype=dtype)
    params, _ = trained("inductor", tensor_lr=True, dtype=dtype)
    for a, b in zip(params, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)
