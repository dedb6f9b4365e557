"""`torch.compile` around a step leaves it eager: the same bits, and the same error handling."""

import pytest
import torch

from muonsw import AdamWSW, MuonSW
from tests.common.problems import assert_same, eager_and_compiled, matrices, set_gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_step_is_the_eager_one(dtype):
    def build(params):
        groups = [
            {"params": params[:2]},
            {"params": params[2:3], "algorithm": "adamw"},
            {"params": params[3:], "matrix": "stack", "cautious": True},
        ]
        return MuonSW(groups, lr=0.05, weight_decay=0.3)

    eager, compiled, optimizer = eager_and_compiled(build, (8, 8), (4, 12), (5,), (3, 4, 4), dtype=dtype)
    assert_same(compiled, eager)
    assert {group["resolved_peak_lr"] for group in optimizer.param_groups} == {0.05}


def test_a_training_step_compiles_around_it():
    """The usual form: forward, backward and step in one compiled function."""
    torch._dynamo.reset()
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        optimizer = MuonSW.for_model(model, lr=0.05, ns_dtype="float32")

        def train(x, model=model, optimizer=optimizer):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = torch.compile(train, backend="eager") if compiled else train
        for _ in range(4):
            step(torch.ones(3, 4))
        results.append([param.detach() for param in model.parameters()])
    assert_same(*results)


@pytest.mark.parametrize(
    ("lr", "gradient", "error"),
    [(0.2, torch.nan, "holds infinities or NaNs"), (50.0, 1.0, "5 times the weight")],
    ids=["gradient", "decay"],
)
def test_a_compiled_step_that_raises_leaves_no_peak(lr, gradient, error):
    """A running peak that stayed would weaken decay for the rest of the run."""
    torch._dynamo.reset()
    params = matrices((4, 3))
    optimizer = AdamWSW(params, lr=0.1, weight_decay=0.1, peak_lr="running_max", nonfinite="raise")
    step = torch.compile(optimizer.step, backend="eager")
    set_gradients(params, 0)
    step()
    optimizer.param_groups[0]["lr"] = lr
    params[0].grad.mul_(gradient)
    with pytest.raises((ValueError, FloatingPointError), match=error):
        step()
    group = optimizer.param_groups[0]
    assert (group["resolved_peak_lr"], group["highest_lr"]) == (0.1, 0.1)
