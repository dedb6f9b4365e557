"""What this process runs on and with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from muonsw.version import __version__

PACKAGES = ("torch", "numpy", "matplotlib", "plotly")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def environment() -> dict[str, Any]:
    """Versions and the class of machine; nothing that identifies it or its user."""
    return {
        "muonsw": __version__,
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_cores": cores(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
