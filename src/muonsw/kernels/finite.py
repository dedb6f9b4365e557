"""Check whether all gradients are finite, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from muonsw.kernels import launch_on
from muonsw.kernels.common import DTYPES, block_of, start, whole_number
from muonsw.kernels.tables import addresses, block_map, lengths, table
from muonsw.work import all_contiguous

BLOCK_BYTES = 8192
WARPS = 4


@triton.jit(do_not_specialize=["tensors"])
def _set_if_not_finite(bad, pointers, tensors, blocks, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    owner, offsets = block_of(blocks, BLOCK)
    inside = offsets < whole_number(pointers, tensors + owner, ALIGNED)
    grad = tl.load(start(pointers, owner, DTYPE, ALIGNED) + offsets, mask=inside, other=0.0).to(tl.float32)
    finite = tl.abs(grad) < float("inf")
    if tl.sum(finite.to(tl.int32), axis=0) < BLOCK:
        tl.store(bad, 1.0)


def find_bad(grads: Sequence[Tensor], bad: Tensor) -> bool:
    """Set `bad`, a float32 scalar, to 1 if any element is not finite; return False if the kernel cannot read them."""
    device, dtypes = bad.device, {grad.dtype for grad in grads}
    if not (dtypes <= DTYPES.keys() and all_contiguous(grads)):
        return False
    for dtype in dtypes:
        same = grads if len(dtypes) == 1 else [grad for grad in grads if grad.dtype == dtype]
        sizes, block = lengths(same), BLOCK_BYTES // dtype.itemsize
        both, blocks = table((addresses(same), sizes), device), block_map(sizes, block, device)
        launch_on(
            device,
            _set_if_not_finite,
            (blocks.shape[1],),
            bad,
            both.numbers,
            len(sizes),
            blocks,
            DTYPE=DTYPES[dtype],
            ALIGNED=both.aligned,
            BLOCK=block,
            num_warps=WARPS,
        )
    return True
