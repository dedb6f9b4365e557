"""Tests that run the real frameworks, whose own warnings we ignore."""

import sys
from pathlib import Path

import pytest

from muonsw import machine
from tests.models.packages import missing, prepare

if not missing():
    prepare()

HERE = Path(__file__).parent
OURS_STAY_ERRORS = ("error::muonsw.PeakLRWarning", "error::muonsw.NonFiniteGradientWarning")


@pytest.fixture(autouse=True)
def _float32(monkeypatch):
    """Multiply in float32, here and in child processes, as the plain loops do."""
    monkeypatch.setattr(machine, "fast_bfloat16", lambda: False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI")  # excludes bfloat16; machine.py reads it, too


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in Path(item.fspath).parents:
            item.add_marker(pytest.mark.integrations)
            for rule in ("ignore", *OURS_STAY_ERRORS):
                item.add_marker(pytest.mark.filterwarnings(rule), append=False)


@pytest.fixture(autouse=True)
def _one_quiet_process(monkeypatch):
    for key, value in {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(key, value)


@pytest.fixture(autouse=True)
def _no_accelerator_state():
    """Accelerate's state is global and keeps the precision of the first test."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
