"""Triton kernels for accelerators; each does in one pass what a torch twin elsewhere does in several.

| module | one pass for | its torch twin |
|---|---|---|
| `momentum` | momentum, Nesterov, `precondition`, squares, cast; then division by the norm | `base.advance_momentum` |
| `normalize` | the factors of NorMuon, AdaMuon and Muon+, their state where it lies | `slots` |
| `symmetric` | `alpha A B + beta C + gamma I`, one triangle, mirrored | `torch.baddbmm` |
| `move` | factors, decay, cautious mask, rounding and move of Muon's matrices | `apply.apply_update` |
| `adamw` | the whole step, on encoded state too | `algorithms.adamw` and `apply` |
| `stored` | state in 8 bits or bfloat16, encoded or decoded | `encode`, `decode`, `round_bfloat16` of `codecs` |
| `finite` | whether a gradient is not finite | `nonfinite.all_finite` |

The modules import Triton, so they are imported where `available` has said yes and nowhere else.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from muonsw import machine
from muonsw.text import users_line

# Elements of a whole batch below which torch's fused kernels on GPUs are quicker than ours. They need a launch for some
# thirty tensors where ours need one, and move more bytes; but ours first need, from Python, the address of every
# tensor, and that takes longer than the work itself while there is little of it.
TORCH_BELOW = 2**26


def available(device: torch.device) -> bool:
    """Whether kernels run on this device; where a GPU cannot have them, a warning says so once."""
    if device.type != "cuda":
        return False
    if device not in _USABLE:
        if torch.cuda.is_current_stream_capturing():
            return False  # nothing can be compiled now; the next step outside the capture finds out
        _USABLE[device] = _usable(device)
    return _USABLE[device]


# What each device answered, asked once.
_USABLE: dict[torch.device, bool] = {}


def _usable(device: torch.device) -> bool:
    reason = "Triton is not installed"
    if machine.triton():
        from muonsw.kernels.finite import find_bad

        try:
            numbers = torch.zeros(16, dtype=torch.float32, device=device)  # sixteen: steps read aligned numbers
            find_bad([numbers], numbers[0].clone())
            return True
        except Exception as error:  # whatever a compiler or a driver may raise
            reason = f"{type(error).__name__}: {error}"
    warnings.warn(f"steps on {device} use plain torch operations, which are slower: {reason}", stacklevel=users_line())
    return False


# Who looks at what kernels are given, while a graph is captured.
watches: list[Callable[[Sequence[Any]], None]] = []


def launch_on(device: torch.device, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel on a device, in the stream that is current there.

    Triton launches on the current device, whatever the device of its arguments; every launch goes through here.
    """
    for look in watches:
        look(arguments)
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        kernel[grid](*arguments, **options)
        return
    with torch.cuda.device(device):
        kernel[grid](*arguments, **options)
