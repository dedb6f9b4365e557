"""Whether a step may be taken, where only the device knows: gradients that are not finite change nothing."""

from __future__ import annotations

import torch
from torch import Tensor

# Steps for which a device has a number ready, and the distance between two of them: kernels are compiled anew for
# addresses that are no multiples of sixteen bytes.
_ROOM, _APART = 256, 4


class Flags:
    """Zeros on a device, one for each step, in which a flag is raised.

    They lie side by side: a step takes the next, and no launch is needed to make it or to count it. All are counted
    and cleared together when they are used up.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._room = torch.zeros(_ROOM, _APART, dtype=torch.float32, device=device)
        self._free = self._all()
        self._counted = torch.zeros((), dtype=torch.float32, device=device)

    def next(self) -> Tensor:
        """A zero that nobody has used."""
        if not self._free:
            self._counted += self._room.sum()
            self._room.zero_()
            self._free = self._all()
        return self._free.pop()

    def _all(self) -> list[Tensor]:
        return list(self._room[:, 0].unbind())

    @property
    def raised(self) -> int:
        """How many were raised so far; waits for the device."""
        return int(self._counted + self._room.sum())


class Flag:
    """A scalar on the device, in the forms that kernels ask for. Each is made when it is asked for, and once.

    A launch costs a small step more than its arithmetic, so nothing is computed in advance.

    Attributes:
        bad: 1 where a gradient is not finite and nothing may change, else 0, in float32: what torch's fused kernels
            take, and ours.
        counted: whether it is one of `Flags`, which count themselves.
    """

    def __init__(self, bad: Tensor, *, counted: bool = False) -> None:
        self.bad = bad
        self.counted = counted
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
