"""Whether a step may be taken, where only the device knows: gradients that are not finite change nothing."""

from __future__ import annotations

import torch
from torch import Tensor


class Flag:
    """A scalar on the device, in the forms that kernels ask for. Each is made when it is asked for, and once.

    A launch costs a small step more than its arithmetic, so nothing is computed in advance.

    Attributes:
        bad: 1 where a gradient is not finite and nothing may change, else 0, in float32: what torch's fused kernels
            take, and ours.
    """

    def __init__(self, bad: Tensor) -> None:
        self.bad = bad
        self._ok: Tensor | None = None
        self._taken: Tensor | None = None

    @classmethod
    def from_ok(cls, ok: Tensor) -> Flag:
        """The flag of a boolean scalar that is true where the step may be taken."""
        flag = cls((~ok).float())
        flag._ok = ok
        return flag

    @property
    def ok(self) -> Tensor:
        """True where the step may be taken."""
        if self._ok is None:
            self._ok = self.bad == 0
        return self._ok

    @property
    def taken(self) -> Tensor:
        """The number of steps that are taken, 1 or 0, in float32."""
        if self._taken is None:
            self._taken = 1 - self.bad
        return self._taken

    def factor(self, dtype: torch.dtype) -> Tensor:
        """The same number, in float64 for tensors of that precision."""
        return self.taken.double() if dtype == torch.float64 else self.taken

    def to(self, device: torch.device) -> Flag:
        """The flag on another device, without waiting."""
        return self if self.bad.device == device else Flag(self.bad.to(device, non_blocking=True))
