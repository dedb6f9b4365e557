"""This process: the machine it runs on, how it is asked to stop, and its threads."""

from __future__ import annotations

import platform
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import FrameType
from typing import Any

import torch

from muonsw import __version__, machine
from muonsw.lab.base.launcher import is_rank

PACKAGES = ("torch", "numpy", "matplotlib", "plotly", "transformers", "timm")
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


def environment() -> dict[str, Any]:
    """Describe versions and the class of machine; nothing identifies it or its user."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    return {
        "muonsw": __version__,
        "python": platform.python_version(),
        **{name: installed(name) for name in PACKAGES},
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_cores": machine.cores(),
    }


class StopRequest:
    """Set by a signal, read where work can be saved."""

    signal: int | None = None


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Turn Ctrl-C, SIGTERM and SIGHUP into a request; a second Ctrl-C raises `KeyboardInterrupt`.

    When a rank leaves the block by an error, the handlers stay: torchrun sends SIGTERM to the other ranks of a lost one
    just when they are about to report why they end.
    """
    request = StopRequest()

    def ask(number: int, _frame: FrameType | None) -> None:
        if request.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal = number

    if threading.current_thread() is not threading.main_thread():
        yield request  # Python delivers signals to the main thread alone
        return
    # nohup ignores SIGHUP, and the run should too.
    kept = [one for one in STOP_SIGNALS if one == signal.SIGINT or signal.getsignal(one) is not signal.SIG_IGN]
    before = {number: signal.signal(number, ask) for number in kept}
    try:
        yield request
    finally:
        for number, handler in before.items() if sys.exc_info()[0] is None or not is_rank() else ():
            signal.signal(number, handler)


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Set the number of torch's threads inside the block; None changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
