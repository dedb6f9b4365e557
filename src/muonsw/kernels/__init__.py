"""Triton kernels for accelerators; each does in one pass what a torch twin elsewhere does in several.

| module | one pass for | its torch twin |
|---|---|---|
| `momentum` | gradient, momentum, Nesterov, sum of squares, cast; then division by the norm | `algorithms.momentum` |
| `symmetric` | `alpha A B + beta C + gamma I`, one triangle, mirrored | `torch.baddbmm` |
| `move` | decay, cautious mask, rounding and move of Muon's matrices | `apply.apply_update` |
| `adamw`, `sgd` | the whole step, from gradient to weight | `algorithms.adamw`, `algorithms.sgd` and `apply` |
| `finite` | whether a gradient is not finite | `nonfinite.all_finite` |

The modules import Triton, so they are imported where `available` has said yes and nowhere else.
"""

from __future__ import annotations

import functools
import os
import warnings

import torch

from muonsw import machine

# Set to "0" to take the torch path everywhere, to compare or to search for an error.
SWITCH = "MUONSW_KERNELS"


def available(device: torch.device) -> bool:
    """Whether kernels run on this device; where a GPU cannot have them, a warning says so once.

    Inside `torch.compile` they are left to the compiler, which fuses the torch path by itself.
    """
    if torch.compiler.is_compiling():
        return False
    return device.type == "cuda" and _usable(device)


@functools.cache
def _usable(device: torch.device) -> bool:
    if os.environ.get(SWITCH) == "0":
        return False
    reason = _failure(device) if machine.triton() else "Triton is not installed"
    if reason:
        warnings.warn(f"steps on {device} use plain torch operations, which are slower: {reason}", stacklevel=2)
    return not reason


def _failure(device: torch.device) -> str:
    """Why the smallest kernel does not run on this device; empty if it does."""
    from muonsw.kernels.finite import find_bad

    try:
        find_bad([torch.zeros(1, device=device)], torch.zeros((), device=device))
    except Exception as error:  # whatever a compiler or a driver may raise
        return f"{type(error).__name__}: {error}"
    return ""
