"""Kernels are collected where Triton is installed; without a GPU they run in its interpreter.

TEST_MACHINE="cores=1 triton=0" lets all tests of a session run as on another machine (`make test-again`).

No test sees a terminal but one that it makes: variables that let rich take a file for one are removed. Where a test
asks for several threads, those that have nothing to do sleep: beside other workers they would only keep cores busy.
"""

import gc
import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

import pytest
from tests.other_machine import pretend

from muonsw import machine

pretend(os.environ.get("TEST_MACHINE", ""), pytest.MonkeyPatch())  # before tests are collected, which ask already

KERNELS = ["src/muonsw/kernels/[a-z]*.py", "src/muonsw/lab/model/kernels.py"]
collect_ignore_glob = [] if machine.triton() else KERNELS

if not machine.gpus():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

for _variable in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
    os.environ.pop(_variable, None)


def pytest_collection_finish():
    """Keep the garbage collector from looking through thousands of tests again and again: a tenth of the time."""
    gc.freeze()
