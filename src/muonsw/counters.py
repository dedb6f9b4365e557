"""What steps count, on the host or on the device, and what the user has been warned of.

The device is never read during a step. It counts skipped steps in a tensor that is written in place, because a captured
graph writes to this very tensor; the host reads it where it waits anyway, in `state_dict` and in telemetry.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch

from muonsw.nonfinite import Flag, Flags, NonFiniteGradientWarning, describe_non_finite
from muonsw.text import users_line
from muonsw.work import Item


class Counters:
    """Flags, counters and warnings of one optimizer. None of them is saved."""

    def __init__(self) -> None:
        self._skipped_on_host = 0
        self._skipped_on_device = torch.zeros((), dtype=torch.float32, device="cpu")
        self._flags: Flags | None = None
        self._warned: set[str] = set()
        self._skips_warned_of = 0

    @property
    def address(self) -> int:
        """Where a captured graph counts the steps that it skips."""
        return self._skipped_on_device.data_ptr()

    def place(self, device: torch.device) -> None:
        """Bring the count to the device on which a graph will write it."""
        if self._skipped_on_device.device != device:
            self._skipped_on_device = self._skipped_on_device.to(device)

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped for gradients that were not finite; waits for the device."""
        counted = 0 if self._flags is None else self._flags.raised
        return self._skipped_on_host + int(self._skipped_on_device) + counted

    def flags(self, device: torch.device) -> Flags | None:
        """Zeros for the finite check of eager steps on a GPU; None during a capture, which would freeze one of them."""
        if torch.cuda.is_current_stream_capturing():
            return None
        if self._flags is None:
            self._flags = Flags(device)
        return self._flags

    def skip_on_device(self, flag: Flag) -> None:
        """Count a step that the device will skip where the flag forbids it."""
        if not flag.counted:
            self.place(flag.bad.device)
            self._skipped_on_device.add_(flag.bad)

    def skip_on_host(self, items: Sequence[Item]) -> None:
        """Count a step that is skipped, and warn of it at growing intervals."""
        self._skipped_on_host += 1
        self.warn_of_skips(self._skipped_on_host, items)

    def warn_of_skips(self, skipped: int | None = None, items: Sequence[Item] = ()) -> None:
        """Warn at the first skipped step, and at tenfold numbers of them; counting waits for the device."""
        skipped, before = self.skipped_steps if skipped is None else skipped, self._skips_warned_of
        if skipped <= before or (before and skipped < 10 * 10 ** int(math.log10(before))):
            return
        self._skips_warned_of = skipped
        cause = describe_non_finite(items) if items else "gradients held infinities or NaNs"
        steps = "1 step has" if skipped == 1 else f"{skipped} steps have"
        warnings.warn(
            f"{steps} been skipped so far: {cause}; weights and state stayed as they were. If it goes on, lower the "
            f"learning rate, or find the cause with nonfinite='raise'",
            NonFiniteGradientWarning,
            stacklevel=users_line(),
        )

    def warn_once(self, topic: str, message: str, category: type[Warning] = UserWarning) -> None:
        """Give the first warning of each topic."""
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, category, stacklevel=users_line())
