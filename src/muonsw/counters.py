"""What steps count, on the host or on the device, and what the user has been warned of.

The device is never asked during a step. What only it knows (a skipped step, a learning rate in a tensor that was
wrong) is remembered there, in tensors that are written in place because a captured graph writes to these very ones, and
read where the host waits for the device anyway: in `check`, which `state_dict` and telemetry call.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from muonsw import peak
from muonsw.nonfinite import Flag, Flags, NonFiniteGradientWarning, describe_non_finite
from muonsw.peak import PeakLRError, PeakLRWarning
from muonsw.text import users_line
from muonsw.work import Group, Item, copied_to

_NO_GRADIENT = (
    "this step found no gradient at all, so nothing was changed; if the model was wrapped, sharded or moved after the "
    "optimizer was built, build the optimizer last"
)

_NO_DECAY = (
    "no param group decays: each has weight_decay=0 of its own, as frameworks and routing give it to what should not "
    "decay, whatever the optimizer was built with; set it in the groups that should, or build the optimizer with "
    "weight_decay=0"
)

_WRONG_RATE = (
    "a tensor learning rate exceeded its peak, was negative or not finite, or a tensor weight decay was negative, or a "
    "decay factor exceeded 1, in an earlier step; if the schedule is as it should be, pass peak_lr=<the highest "
    "learning rate of the run>, or call set_peak_lr(scheduler) before it"
)


class Counters:
    """Flags and counters of one optimizer. None of them is saved."""

    def __init__(self) -> None:
        self.placed: tuple[Any, ...] = ()
        self.skipped_on_host = 0
        self._skipped_on_device = torch.zeros((), dtype=torch.float32, device="cpu")
        self._flags: Flags | None = None
        self._wrong = torch.zeros((), dtype=torch.bool, device="cpu")
        self._groups: list[Group] = []  # those of the last step, held so that no other gets their ids
        self._highest: list[Tensor] = []
        self._warned: set[str] = set()
        self._skips_warned_of = 0
        self._records: dict[int, list[tuple[Any, int]]] = {}

    def is_new_record(self, number: int, group: Group) -> bool:
        """Whether a scheduler has written another peak into a group since the last step; a tensor is not read."""
        values = [group.get(key) for key in peak.RECORDS]
        now = [(value, value._version if isinstance(value, Tensor) else 0) for value in values]
        before, self._records[number] = self._records.get(number), now
        return before is None or any(a[0] is not b[0] or a[1] != b[1] for a, b in zip(now, before, strict=True))

    def forget_highest(self, number: int) -> None:
        """A peak was raised, so that what came before says nothing of whether it will be reached."""
        self._highest[number].zero_()

    def forget_records(self) -> None:
        """A step was refused, and the peaks that it had taken from schedulers with it."""
        self._records.clear()

    @property
    def device(self) -> torch.device:
        """Where the flags are."""
        return self._wrong.device

    @property
    def address(self) -> int:
        """Where a captured graph counts the steps that it skips."""
        return self._skipped_on_device.data_ptr()

    def place(self, groups: Sequence[Group], device: torch.device) -> None:
        """Bring the flags to the device of the parameters, and the highest learning rates into the groups' order."""
        self._skipped_on_device, self._wrong = self._skipped_on_device.to(device), self._wrong.to(device)
        known = {id(group): highest.to(device) for group, highest in zip(self._groups, self._highest, strict=True)}
        zeros = torch.zeros(len(groups), dtype=torch.float32, device=device).unbind()
        self._highest = [known.get(id(group), zero) for group, zero in zip(groups, zeros, strict=True)]
        self._groups = list(groups)
        self._records.clear()
        self.placed = (device, *map(id, groups))  # last: memory may run out above

    def replace_groups(self, groups: Sequence[Group]) -> None:
        """Groups were loaded, each in place of another, and say themselves how high their rates were."""
        if len(groups) == len(self._groups):
            self._groups = list(groups)
            for highest in self._highest:  # in place: a graph may write to it
                highest.zero_()

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped for gradients that were not finite; waits for the device."""
        counted = 0 if self._flags is None else self._flags.raised
        return self.skipped_on_host + int(self._skipped_on_device) + counted

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
            self._skipped_on_device.add_(flag.bad)

    def skip_on_host(self, items: Sequence[Item]) -> None:
        """Count a step that is skipped, and warn of it at growing intervals."""
        self.skipped_on_host += 1
        self._warn_of_skips(self.skipped_on_host, items)

    def record_wrong(self, wrong: Tensor) -> None:
        """Remember on the device that a rate there was wrong."""
        self._wrong.logical_or_(copied_to(wrong, self._wrong.device))

    def record_highest(self, number: int, eta: Tensor) -> None:
        """Remember on the device how high a group's learning rate was."""
        self._highest[number].clamp_(min=copied_to(eta, self._wrong.device, torch.float32))

    def read_rates(self) -> None:
        """Bring the highest learning rates from the device into the groups."""
        for group, highest in zip(self._groups, self._highest, strict=True):
            if isinstance(group["lr"], Tensor):
                group["highest_lr"] = max(group["highest_lr"] or 0.0, float(highest)) or group["highest_lr"]

    def check(self) -> None:
        """Raise for rates that were wrong, once; waits for the device."""
        wrong = bool(self._wrong)
        self._wrong.zero_()
        if wrong:
            raise PeakLRError(_WRONG_RATE)

    def warn_of_wrong_rates(self) -> None:
        """Warn of rates that were wrong, for as long as `check` has not raised for them; waits for the device."""
        if bool(self._wrong):
            warnings.warn(_WRONG_RATE, PeakLRWarning, stacklevel=3)

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
