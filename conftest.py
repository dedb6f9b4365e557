"""Kernels are collected where Triton is installed; without a GPU they run in its interpreter.

No test sees a terminal but one that it makes: variables that let rich take a file for one are removed.
"""

import gc
import os

from muonsw import machine

KERNELS = ["src/muonsw/kernels/[a-z]*.py", "src/muonsw/lab/model/kernels.py"]
collect_ignore_glob = [] if machine.triton() else KERNELS

if not machine.gpus():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

for _variable in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
    os.environ.pop(_variable, None)


def pytest_collection_finish():
    """Keep the garbage collector from looking through thousands of tests again and again: a tenth of the time."""
    gc.freeze()
