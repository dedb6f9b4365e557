"""Triton kernels, each with a torch version that needs several passes.

| module | one pass for | torch version |
|---|---|---|
| `momentum` | momentum, Nesterov, `precondition`, squares, cast; then division by the norm | `base.advance_momentum` |
| `normalize` | the factors of NorMuon, AdaMuon and Muon+, with their state in place | `slots` |
| `symmetric` | `alpha A B + beta C + gamma I`, one triangle, mirrored | `torch.baddbmm` |
| `move` | factors, decay, cautious mask, rounding and move of Muon's matrices | `apply.apply_update` |
| `adamw` | the whole step, on encoded state too | `algorithms.adamw` and `apply` |
| `stored` | encoding and decoding of state in 8 bits or bfloat16 | `encode`, `decode`, `round_bfloat16` of `codecs` |
| `finite` | the check for non-finite gradients | `nonfinite.all_finite` |

These modules import Triton, so import them only after `available` returned True.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from muonsw import machine
from muonsw.text import users_line

# Batches with fewer elements use torch's fused kernels on GPUs. Those need one launch per thirty tensors and move more
# bytes, but ours first collect the address of every tensor in Python, which takes longer than a small batch itself.
TORCH_BELOW = 2**26


def available(device: torch.device) -> bool:
    """Whether kernels run on this device; warns once if a GPU cannot run them."""
    if device.type != "cuda":
        return False
    if device not in _USABLE:
        if torch.cuda.is_current_stream_capturing():
            return False  # cannot compile during a capture; ask again at the next eager step
        _USABLE[device] = _usable(device)
    return _USABLE[device]


# The result for each device.
_USABLE: dict[torch.device, bool] = {}


def _usable(device: torch.device) -> bool:
    reason = "Triton is not installed"
    if machine.triton():
        from muonsw.kernels.finite import find_bad

        try:
            numbers = torch.zeros(16, dtype=torch.float32, device=device)  # 16, because steps read aligned numbers
            find_bad([numbers], numbers[0].clone())
            return True
        except Exception as error:  # a compiler or driver may raise anything
            reason = f"{type(error).__name__}: {error}"
    warnings.warn(f"steps on {device} use plain torch operations, which are slower: {reason}", stacklevel=users_line())
    return False


# Called with the arguments of every launch while a graph is captured.
watches: list[Callable[[Sequence[Any]], None]] = []


def launch_on(device: torch.device, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel on a device, in its current stream.

    Triton alone would launch on the current device, whatever the device of its arguments.
    """
    for watch in watches:
        watch(arguments)
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*arguments, **options)
        return
    with torch.cuda.device(device):
        kernel[grid](*arguments, **options)
