"""Find non-finite gradients before a step changes anything, without waiting for the device.

On a GPU the result stays on the device as a `Flag` that gates every write of the step. One tensor on the device counts
skipped steps, because captured graphs write to it; the host reads it only in `state_dict` and telemetry, which wait
anyway.
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
from muonsw.work import Batch, Item, all_contiguous, elements


class NonFiniteGradientError(FloatingPointError):
    """A gradient holds an infinity or a NaN, and the policy is to raise."""


class NonFiniteGradientWarning(RuntimeWarning):
    """Steps were skipped because a gradient held an infinity or a NaN."""


class Flag:
    """Whether the step may be taken, as a scalar on the device, in the forms that kernels need.

    `bool(flag)` waits for the device.
    """

    def __init__(self, bad: Tensor) -> None:
        self.bad = bad  # 1 if a gradient is not finite and nothing may change, else 0

    def __bool__(self) -> bool:
        return not self.bad

    @cached_property
    def ok(self) -> Tensor:
        return self.bad == 0

    @cached_property
    def taken(self) -> Tensor:
        """1 if the step is taken, else 0, in float32."""
        return 1 - self.bad

    def factor(self, dtype: torch.dtype) -> Tensor:
        """`taken`, in float64 for float64 tensors."""
        return self.taken.double() if dtype == torch.float64 else self.taken

    def to(self, device: torch.device) -> Flag:
        return self if self.bad.device == device else Flag(copied_to(self.bad, device))


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to another device; waits only for copies to the host."""
    return tensor.to(device, non_blocking=device.type != "cpu")


def all_finite(grads: Sequence[Tensor]) -> Tensor:
    """Whether every element is finite, as a boolean scalar on the gradients' device.

    Uses the maximum norm: the Euclidean norm is faster on CPUs but overflows for large finite gradients.
    """
    flags = [torch.stack(torch._foreach_norm(same, math.inf)).isfinite().all() for same in _by_dtype(grads)]
    if not flags:
        return torch.ones((), dtype=torch.bool, device=grads[0].device if grads else "cpu")
    return torch.stack(flags).all() if len(flags) > 1 else flags[0]


def finite_flag(work: Sequence[Batch], captured: bool = False) -> Flag | bool:
    """Whether all gradients are finite: a bool on CPUs, else a flag on the device.

    A captured step finds its gradients through tables, so it uses our kernel at any size.
    """
    if all(batch.device.type == "cpu" for batch in work):
        # Norms are finite only if all elements are; check elements only if a norm overflows.
        grads = [item.grad for batch in work for item in batch.items]
        sums = [torch.stack(torch._foreach_norm(same, 2)).sum() for same in _by_dtype(grads)]
        return all(math.isfinite(total) for total in sums) or bool(all_finite(grads))
    by_device: dict[torch.device, list[Tensor]] = {}
    for batch in work:
        by_device.setdefault(batch.device, []).extend(batch.grads)
    flags = [_bad_on_device(device, grads, captured) for device, grads in by_device.items()]
    home = flags[0].device
    return Flag(flags[0] if len(flags) == 1 else torch.stack([copied_to(bad, home) for bad in flags]).amax())


# Gradient dtypes that mixed precision's check supports.
_AMP_DTYPES = {torch.float32, torch.float16}


def _bad_on_device(device: torch.device, grads: Sequence[Tensor], captured: bool) -> Tensor:
    """1 if an element of these gradients is not finite, else 0."""
    bad = torch.zeros((), dtype=torch.float32, device=device)
    if device.type == "cuda":
        by_dtype = _by_dtype(grads) if elements(grads) < kernels.TORCH_BELOW and not captured else []
        if by_dtype and all_contiguous(grads) and all(same[0].dtype in _AMP_DTYPES for same in by_dtype):
            return _bad_by_amp(bad, by_dtype)
        if kernels.available(device):
            from muonsw.kernels.finite import find_bad

            if find_bad(grads, bad):
                return bad
    return bad.copy_(~all_finite(grads))


def _bad_by_amp(bad: Tensor, by_dtype: Sequence[list[Tensor]]) -> Tensor:
    # The check of torch's mixed precision: few launches, no table of addresses. It multiplies by one in place, which
    # costs a write, so large sets use our kernel.
    one = torch.ones((), dtype=torch.float32, device=bad.device)
    for same in by_dtype:
        torch._amp_foreach_non_finite_check_and_unscale_(same, bad, one)
    return bad


def _by_dtype(grads: Sequence[Tensor]) -> list[list[Tensor]]:
    """Non-empty gradients, grouped by dtype."""
    full = [grad for grad in grads if grad.numel()]
    dtypes = {grad.dtype for grad in full}
    return [full if len(dtypes) == 1 else [grad for grad in full if grad.dtype == dtype] for dtype in dtypes]


def describe_non_finite(items: Sequence[Item]) -> str:
    """Name the parameters whose gradients are not finite; waits for the device."""
    bad = [item.name for item in items if not bool(all_finite([item.grad]))]
    if not bad:
        return "a gradient on another rank holds infinities or NaNs, or a rank could not take the step"
    shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
    return f"the gradient of {shown} holds infinities or NaNs"


class Counters:
    """Counters and warnings of one optimizer; not saved."""

    def __init__(self) -> None:
        self._skipped = torch.zeros((), dtype=torch.float32, device="cpu")
        self._warned: set[str] = set()
        self._skips_warned_of = 0

    @property
    def address(self) -> int:
        """The address at which a captured graph counts skipped steps."""
        return self._skipped.data_ptr()

    def place(self, device: torch.device) -> None:
        """Move the count to the device on which a graph will write it."""
        if self._skipped.device != device:
            self._skipped = copied_to(self._skipped, device)

    @property
    def skipped_steps(self) -> int:
        return int(self._skipped)

    def skip_on_device(self, flag: Flag) -> None:
        self.place(flag.bad.device)
        self._skipped.add_(flag.bad)

    def skip_on_host(self, items: Sequence[Item]) -> None:
        self._skipped.add_(1)
        self.warn_of_skips(items)

    def warn_of_skips(self, items: Sequence[Item] = ()) -> None:
        """Warn at the first skipped step, then at powers of ten; waits for the device."""
        skipped, before = self.skipped_steps, self._skips_warned_of
        if skipped <= before or (before and skipped < 10 * 10 ** int(math.log10(before))):
            return
        self._skips_warned_of = skipped
        cause = describe_non_finite(items) if items else "gradients held infinities or NaNs"
        steps = "1 step has" if skipped == 1 else f"{skipped} steps have"
        warnings.warn(
            f"{steps} been skipped so far: {cause}; weights and state did not change. If this continues, lower the "
            f"learning rate, or find the cause with nonfinite='raise'",
            NonFiniteGradientWarning,
            stacklevel=users_line(),
        )

    def warn_once(self, topic: str, message: str, category: type[Warning] = UserWarning) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, category, stacklevel=users_line())
