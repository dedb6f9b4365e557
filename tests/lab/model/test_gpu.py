"""The model on a CUDA device: the same results as on the CPU, and no waiting."""

import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from muonsw import machine
from muonsw.lab.model import Decoder
from muonsw.lab.model.layers import swiglu_experts
from tests.common.cuda import no_waiting
from tests.lab.model.small_models import small, tokens

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not machine.gpus(), reason="needs a CUDA device"),
]

CONFIG = small(width=128, head_dim=64, ff=256, vocab=1000, sequence=128)


def step(model, ids, autocast):
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        losses = model(ids[:, :-1], ids[:, 1:])
    losses.total.backward()
    return losses


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_losses_and_gradients_are_those_of_the_cpu(autocast):
    here, there = Decoder(CONFIG), Decoder(CONFIG).cuda()
    ids = tokens(CONFIG, batch=4)
    expected = here(ids[:, :-1], ids[:, 1:])
    expected.total.backward()
    got = step(there, ids.cuda(), autocast)
    # bfloat16 keeps 8 bits, and may send a token to another expert where two logits are close
    torch.testing.assert_close(got.total.cpu(), expected.total, rtol=2e-3 if autocast else 1e-5, atol=0)
    for (name, a), b in zip(there.named_parameters(), here.parameters(), strict=True):
        error = (a.grad.cpu() - b.grad).norm() / b.grad.norm()
        assert error < (0.1 if autocast else 1e-3), f"{name}: {error:.1e}"


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # torch, if this is the first backward of a process
@pytest.mark.parametrize("sizes", [(3, 0, 50, 11), (0, 0, 64, 0), (64, 0, 0, 0)])
def test_experts_agree_with_those_of_the_cpu(sizes):
    """In bfloat16 one kernel for all groups, in float32 every expert on all rows."""
    count = len(sizes)
    tensors = torch.randn(sum(sizes), 64), torch.randn(count, 32, 64) / 8, torch.randn(count, 64, 16) / 4
    ends, upstream = torch.tensor(sizes).cumsum(0).to(torch.int32), torch.randn(sum(sizes), 64)
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
        results = []
        for device in ("cuda", "cpu"):
            inputs = [tensor.to(device) for tensor in tensors]
            inputs = [tensor.requires_grad_() for tensor in (inputs[0].to(dtype), *inputs[1:])]
            out = swiglu_experts(*inputs, ends.to(device))
            grads = torch.autograd.grad(out, inputs, upstream.to(device, dtype))
            results.append([out.cpu(), *(grad.cpu() for grad in grads)])
        for found, expected in zip(*results, strict=True):
            assert (found.float() - expected.float()).norm() <= bound * expected.float().norm()


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
def test_a_step_never_waits_for_the_device(autocast):
    model, ids = Decoder(CONFIG).cuda(), tokens(CONFIG, batch=4).cuda()
    step(model, ids, autocast)
    with no_waiting():
        losses = step(model, ids, autocast)
    assert losses.total.isfinite()


def reads_back(source):
    """The buffers that a kernel reads after it has stored to them."""
    stored, found = set(), []
    for action, buffer in re.findall(r"tl\.(load|store)\((\w+) \+", source):
        if action == "store":
            stored.add(buffer)
        elif buffer in stored:
            found.append(buffer)
    return found


# torch's compiler instantiates autograd functions, which torch warns about, and advises on speed
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("width", [128, 512, 1024])
def test_no_compiled_kernel_reads_back_what_it_has_stored(width):
    """Threads do not wait between such a store and load, so some would read the old content."""
    config = small(width=width, head_dim=64, ff=256, vocab=1000, sequence=128, experts=4)
    model, ids = Decoder(config).cuda(), tokens(config, batch=4).cuda()
    torch.compiler.reset()
    compiled = torch.compile(model.forward)

    def run():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            compiled(ids[:, :-1], ids[:, 1:]).total.backward()

    _, sources = run_and_get_code(run)
    kernels = [body for source in sources for body in re.findall(r"def triton_\w+\(.*?(?=\n\'\'\')", source, re.DOTALL)]
    assert len(kernels) > 10
    assert {kernel.partition("(")[0]: reads_back(kernel) for kernel in kernels if reads_back(kernel)} == {}
