"""State lies in memory as its parameter does, wherever it comes from."""

import copy

import pytest
import torch
from torch import nn

from muonsw import AdamWSW
from tests.common.problems import matrices, set_gradients

SHAPE = (6, 4, 3, 5)


def stepped(memory_format, steps=2, **options):
    (start,) = matrices(SHAPE)
    param = nn.Parameter(start.detach().to(memory_format=memory_format))
    optimizer = AdamWSW([param], lr=0.05, weight_decay=0.3, **options)
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
    theirs, param = stepped(torch.channels_last, chunk_bytes=chunk_bytes)
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
    torch.testing.assert_close(own, param)
