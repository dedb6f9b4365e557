"""Where a warning points."""

from __future__ import annotations

import inspect

# torch wraps `step` in decorators of its own, and a scheduler or a hook may call it from torch's code.
PASSED_OVER = ("muonsw", "torch", "contextlib", "functools")


def users_line() -> int:
    """The `stacklevel` with which a warning of the calling function points at the user's line."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in PASSED_OVER:
        frame, level = frame.f_back, level + 1
    return level if frame is not None else 1
