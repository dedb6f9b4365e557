"""Find non-finite gradients before a step changes anything, without waiting for the device.

On a GPU the result stays on the device as a `Flag`, which every write of the step respects. Skipped steps are counted
in one tensor on the device, because captured graphs write to it; the host reads it only where it waits anyway, in
`state_dict` and in telemetry.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from muonsw import kernels
from muonsw.text import users_line
from muonsw.work import Batch, Item, all_contiguous, copied_to, dtypes_of, elements

POLICIES = ("skip", "raise", "propagate")


class NonFiniteGradientError(FloatingPointError):
    """A gradient holds an infinity or a NaN, and the policy is to raise."""


class NonFiniteGradientWarning(RuntimeWarning):
    """Steps were skipped because a gradient held an infinity or a NaN."""


class Flag:
    """A scalar on the device in the forms that kernels need, each computed when it is first used."""

    def __init__(self, bad: Tensor) -> None:
        self.bad = bad  # 1 where a gradient is not finite and nothing may change, else 0, as fused kernels take it

    @cached_property
    def ok(self) -> Tensor:
        return self.bad == 0

    @cached_property
    def taken(self) -> Tensor:
        """The number of steps that are taken, 1 or 0, in float32."""
        return 1 - self.bad

    def factor(self, dtype: torch.dtype) -> Tensor:
        """The same number, in float64 for tensors of that precision."""
        return self.taken.double() if dtype == torch.float64 else self.taken

    def to(self, device: torch.device) -> Flag:
        return self if self.bad.device == device else Flag(copied_to(self.bad, device))


def all_finite(grads: Sequence[Tensor]) -> Tensor:
    """A boolean scalar on the gradients' device: whether every element is finite, by torch's operations.

    The Euclidean norm is several times faster on CPUs but overflows for gradients that are large and finite.
    """
    flags = [torch.stack(torch._foreach_norm(same, math.inf)).isfinite().all() for same in _by_dtype(grads)]
    if not flags:
        return torch.ones((), dtype=torch.bool, device=grads[0].device if grads else "cpu")
    return torch.stack(flags).all() if len(flags) > 1 else flags[0]


def finite_flag(work: Sequence[Batch], captured: bool = False) -> Flag | bool:
    """Whether this step may be taken: a bool where the host can know at no cost, else a flag on the device.

    A step that is to be captured finds its gradients through tables, so it takes our kernel whatever their size.
    """
    if all(batch.device.type == "cpu" for batch in work):
        return _finite_on_host([item.grad for batch in work for item in batch.items])
    by_device: dict[torch.device, list[Tensor]] = {}
    for batch in work:
        by_device.setdefault(batch.device, []).extend(batch.grads)
    flags = [_bad_on_device(device, grads, captured) for device, grads in by_device.items()]
    home = flags[0].device
    return Flag(flags[0] if len(flags) == 1 else torch.stack([copied_to(bad, home) for bad in flags]).amax())


def _finite_on_host(grads: Sequence[Tensor]) -> bool:
    """Check norms, which are finite only if every element is, and elements only if a norm has overflowed."""
    sums = [torch.stack(torch._foreach_norm(same, 2)).sum() for same in _by_dtype(grads)]
    return all(math.isfinite(total) for total in sums) or bool(all_finite(grads))


# Dtypes of gradients that mixed precision's check reads.
_AMP_DTYPES = {torch.float32, torch.float16}


def _bad_on_device(device: torch.device, grads: Sequence[Tensor], captured: bool) -> Tensor:
    """One if an element of these gradients is not finite, else zero."""
    bad = torch.zeros((), dtype=torch.float32, device=device)
    if device.type == "cuda":
        by_dtype = _by_dtype(grads) if elements(grads) < kernels.TORCH_BELOW and not captured else []
        if by_dtype and all_contiguous(grads) and all(same[0].dtype in _AMP_DTYPES for same in by_dtype):
            return _bad_by_amp(bad, by_dtype)
        if kernels.available(device):
            from muonsw.kernels import finite

            if finite.takes(grads):
                finite.find_bad(grads, bad)
                return bad
    return bad.copy_(~all_finite(grads))


def _bad_by_amp(bad: Tensor, by_dtype: Sequence[list[Tensor]]) -> Tensor:
    # The check of torch's mixed precision: few launches, no table of addresses. It multiplies by one in place, which
    # changes nothing but costs a write, so large sets take our kernel.
    one = torch.ones((), dtype=torch.float32, device=bad.device)
    for same in by_dtype:
        torch._amp_foreach_non_finite_check_and_unscale_(same, bad, one)
    return bad


def _by_dtype(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    """Gradients that have elements, those of one dtype together."""
    full = [grad for grad in grads if grad.numel()]
    dtypes = dtypes_of(full)
    return [full if len(dtypes) == 1 else [grad for grad in full if grad.dtype == dtype] for dtype in dtypes]


def describe_non_finite(items: Sequence[Item]) -> str:
    """Name the parameters whose gradients are not finite; waits for the device."""
    bad = [item.name for item in items if not bool(all_finite([item.grad]))]
    if not bad:
        return "a gradient on another rank holds infinities or NaNs, or that rank cannot take the step"
    shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    return f"the gradient of {shown} holds infinities or NaNs"


class Counters:
    """Counters and warnings of one optimizer. None of them is saved."""

    def __init__(self) -> None:
        self._skipped_on_host = 0
        self._skipped_on_device = torch.zeros((), dtype=torch.float32, device="cpu")
        self._warned: set[str] = set()
        self._skips_warned_of = 0

    @property
    def address(self) -> int:
        """Where a captured graph counts the steps that it skips."""
        return self._skipped_on_device.data_ptr()

    def place(self, device: torch.device) -> None:
        """Bring the count to the device on which a graph will write it."""
        if self._skipped_on_device.device != device:
            self._skipped_on_device = copied_to(self._skipped_on_device, device)

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped for gradients that were not finite; waits for the device."""
        return self._skipped_on_host + int(self._skipped_on_device)

    def skip_on_device(self, flag: Flag) -> None:
        self.place(flag.bad.device)
        self._skipped_on_device.add_(flag.bad)

    def skip_on_host(self, items: Sequence[Item]) -> None:
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
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, category, stacklevel=users_line())
