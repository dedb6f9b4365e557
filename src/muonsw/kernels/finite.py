"""Whether all gradients are finite, in one pass over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels.common import DTYPES, start, whole_number
from muonsw.kernels.tables import aligned, all_contiguous, block_map, table

BLOCK = 2048
WARPS = 4


@triton.jit
def _clear_if_not_finite(
    flag, grads, sizes, blocks, programs, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    owner = tl.load(blocks + program)
    offsets = tl.load(blocks + programs + program).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < whole_number(sizes, owner, ALIGNED)
    grad = tl.load(start(grads, owner, DTYPE, ALIGNED) + offsets, mask=inside, other=0.0).to(tl.float32)
    finite = tl.abs(grad) < float("inf")
    if tl.sum(finite.to(tl.int32), axis=0) < BLOCK:
        tl.store(flag, 0)


def takes(grads: Sequence[Tensor]) -> bool:
    """Whether these gradients are laid out as the kernel reads them."""
    return {grad.dtype for grad in grads} <= DTYPES.keys() and all_contiguous(grads)


def all_finite(grads: Sequence[Tensor]) -> Tensor:
    """A boolean scalar on the gradients' device: whether every entry is finite."""
    device = grads[0].device
    flag = torch.ones((), dtype=torch.int8, device=device)
    for dtype in {grad.dtype for grad in grads}:
        same = [grad for grad in grads if grad.dtype == dtype]
        addresses, sizes = [g.data_ptr() for g in same], tuple([g.numel() for g in same])
        both, blocks = table((addresses, sizes), device), block_map(sizes, BLOCK, device)
        programs = blocks.shape[1]
        _clear_if_not_finite[(programs,)](
            flag,
            both[0],
            both[1],
            blocks,
            programs,
            DTYPE=DTYPES[dtype],
            ALIGNED=aligned(addresses, sizes),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return flag.view(torch.bool)
