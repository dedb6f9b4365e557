"""State lies in memory as its parameter does, wherever it comes from."""

import copy

import pytest
import torch
from torch import nn

from muonsw import AdamWSW, MuonSW
from tests.common.problems import matrices, set_gradients

SHAPE = (6, 4, 3, 5)


def stepped(memory_format, steps=2, **options):
    (start,) = matrices(SHAPE, dtype=torch.bfloat16)
    param = nn.Parameter(start.detach().to(memory_format=memory_format))
    optimizer = AdamWSW([param], lr=0.05, weight_decay=0.3, rounding="kahan", **options)
    go_on(optimizer, param, range(steps))
    return optimizer, param


def go_on(optimizer, param, steps):
    for step in steps:
        set_gradients([param], step)
        param.grad = param.grad.to(memory_format=torch.preserve_format)
        optimizer.step()


@pytest.mark.parametrize("chunk_bytes", [None, 64])
def test_a_loaded_state_gets_the_strides_of_its_parameter(chunk_bytes):
    """A channels_last checkpoint in a contiguous model; in chunks, state of other strides cannot be cut at all."""
    theirs, param = stepped(torch.channels_last)
    ours, own = stepped(torch.contiguous_format, chunk_bytes=chunk_bytes)
    with torch.no_grad():
        own.copy_(param)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    state = ours.state[own]
    assert {tensor.stride() for tensor in state.values() if tensor.dim()} == {own.stride()}
    for key, tensor in state.items():
        assert torch.equal(tensor, theirs.state[param][key])
    go_on(ours, own, range(2, 4))
    go_on(theirs, param, range(2, 4))
    # cut differently, but rounded by Kahan's sum, which needs no noise
    torch.testing.assert_close(own.float(), param.float(), rtol=2**-7, atol=1e-4)


def test_so_does_an_adopted_state():
    """torch's own optimizer has made it before the parameter was laid out anew."""
    (param,) = matrices(SHAPE)
    theirs = torch.optim.AdamW([param], lr=0.01, betas=(0.9, 0.95))
    set_gradients([param], 0)
    theirs.step()
    param.data = param.data.to(memory_format=torch.channels_last)
    ours = MuonSW([{"params": [param], "algorithm": "adamw"}], lr=0.01)
    ours.adopt(theirs, peak_lr=0.01)
    for key in ("exp_avg", "exp_avg_sq"):
        assert ours.state[param][key].stride() == param.stride()
        assert torch.equal(ours.state[param][key], theirs.state[param][key])


@pytest.mark.parametrize("algorithm", ["muon", "sgd"])
@pytest.mark.parametrize("capturable", [False, True])
def test_many_small_decays_are_not_rounded_to_one_side(algorithm, capturable):
    """A step of decay rounds a weight, once and to either side; `1 - phi` in float32 rounds to the same side always.

    phi lies in the middle between two float32 numbers of the kind `1 - phi`, so that each step would lose 2^-25 of
    every weight: 5.4e-5 over 1,800 steps. The mean of many weights rounded to either side stays below a hundredth.
    """
    phi, steps = 2.0**-10 + 2.0**-25 - 2.0**-40, 1800
    start = torch.rand(64, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64).add_(0.5).float()
    param = nn.Parameter(start.clone())
    group = {"params": [param], "algorithm": algorithm, "momentum": 0.5}
    optimizer = MuonSW([group], lr=1e-3, weight_decay=phi, decay="fixed", capturable=capturable)
    param.grad = torch.zeros_like(param)
    for _ in range(steps):
        optimizer.step()
    error = param.detach().double() / (start.double() * (1 - phi) ** steps) - 1
    assert abs(float(error.mean())) < 5.4e-7
