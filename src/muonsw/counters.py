"""What steps count, on the host or on the device, and what the user has been warned of.

The device is never asked during a step. It counts skipped steps in a tensor that is written in place, because a graph
writes to this very one; the host reads it where it waits anyway, in `state_dict` and in telemetry.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch

from muonsw.nonfinite import Flag, Flags, NonFiniteGradientWarning, describe_non_finite
from muonsw.peak import PeakLRWarning
from muonsw.text import users_line
from muonsw.work import Group, Item

_NO_GRADIENT = (
    "this step found no gradient at all, so nothing was changed; if the model was wrapped, sharded or moved after the "
    "optimizer was built, build the optimizer last"
)

_NO_DECAY = (
    "no param group decays: each has weight_decay=0 of its own, as frameworks and routing give it to what should not "
    "decay, whatever the optimizer was built with; set it in the groups that should, or build the optimizer with "
    "weight_decay=0"
)


class Counters:
    """Flags and counters of one optimizer. None of them is saved."""

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
        """Zeros for the finite check of eager steps on a GPU; None where there can be none."""
        if torch.cuda.is_current_stream_capturing():
            return None  # a graph would write to the same one at each replay
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
        self._warn_of_skips(self._skipped_on_host, items)

    def warn_of_skips(self) -> None:
        """Warn of skipped steps; waits for the device."""
        self._warn_of_skips(self.skipped_steps)

    def no_gradient(self) -> None:
        """A step that finds nothing to do is most often an optimizer of another model's parameters."""
        self._warn("no gradient", _NO_GRADIENT)

    def no_decay(self) -> None:
        """Groups that a framework has made may all say no to the decay that the optimizer was built with."""
        self._warn("no decay", _NO_DECAY)

    def momentum_not_cycled(self, group: Group) -> None:
        """OneCycleLR and CyclicLR cycle the first beta of an optimizer that has betas, and nothing else."""
        self._warn(
            "momentum not cycled",
            f"the scheduler cycles betas, and algorithm={group['algorithm']!r} has momentum instead, which stays at "
            f"{group['momentum']:g}; pass cycle_momentum=False to the scheduler",
        )

    def never_reached(self, message: str) -> None:
        """Warn of a schedule that has turned down well below its peak."""
        self._warn("peak never reached", message, PeakLRWarning)

    def not_replayed(self, reason: str) -> None:
        """A step that was meant to be replayed and is not is slower, and right."""
        self._warn("not replayed", f"replay=True: steps run eagerly, because {reason}")

    def unfrozen(self, name: str) -> None:
        """Warn of a parameter that was frozen when the optimizer was built, and is not any more."""
        self._warn(
            "unfrozen",
            f"{name} was frozen when this optimizer was built; it requires a gradient now but is in no param group, so "
            f"it is not trained; add it with add_param_group({{'params': [({name!r}, parameter)]}}), or build the "
            f"optimizer after unfreezing",
        )

    def _warn(self, topic: str, message: str, category: type[Warning] = UserWarning) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, category, stacklevel=users_line())

    def _warn_of_skips(self, skipped: int, items: Sequence[Item] = ()) -> None:
        """Warn at the first skipped step, and whenever their number has grown tenfold."""
        before = self._skips_warned_of
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
