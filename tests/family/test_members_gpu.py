"""Members of the family on a CUDA device: equal to the CPU, no waiting. Run by `make test-gpu`."""

import pytest
import torch

from muonsw import MuonSW, machine
from tests.common.cuda import feed, no_waiting, on_gpu
from tests.common.problems import clones, matrices, set_gradients
from tests.family.members import OPTIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.gpus(), reason="needs a CUDA device"),
]

SHAPES = [(64, 64), (32, 33), (4, 48, 47), (64, 64)]


def build(params, name, **options):
    return MuonSW(params, lr=0.05, weight_decay=0.1, matrix="stack", replay=False, **OPTIONS[name], **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_the_cpu(name):
    expected, actual = matrices(*SHAPES, dtype=torch.float64), on_gpu(*SHAPES, dtype=torch.float64)
    on_cpu, on_cuda = build(expected, name, ns_dtype="float64"), build(actual, name, ns_dtype="float64")
    for step in range(4):
        set_gradients(expected, step)
        feed(actual, step)
        on_cpu.step()
        on_cuda.step()
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(b.detach().cpu(), a.detach(), rtol=1e-6, atol=1e-8)


# SOAP's decompositions wait.
@pytest.mark.parametrize("name", [name for name in OPTIONS if "soap" not in name])
def test_a_step_never_waits_for_the_device(name):
    params = on_gpu(*SHAPES)
    optimizer = build(params, name)
    for step in range(2):
        feed(params, step)
        optimizer.step()
    before = clones(params)
    with no_waiting():  # raises where the host would wait
        optimizer.step()
    assert all(bool((now != then).any()) for now, then in zip(params, before, strict=True))
