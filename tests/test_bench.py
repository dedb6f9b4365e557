"""`bench/step_time.py` checks steps before it times them, for every installed library."""

import importlib
from pathlib import Path

import pytest
import torch

CPU = torch.device("cpu")


@pytest.fixture
def steps(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "bench")
    return importlib.import_module("step_time")


def test_a_wrong_step_is_not_timed(steps, monkeypatch):
    assert steps.check(CPU, [(16, 16), (16, 24)]).keys() == {"muon", "adamw"}
    _, torchs, bound = steps.PAIRS["adamw"]
    monkeypatch.setattr(steps, "PAIRS", {"adamw": (lambda p: torchs(p[:1]), torchs, bound)})
    with pytest.raises(SystemExit, match="our adamw step differs from torch's by 100"):
        steps.check(CPU, [(4, 4), (4, 6)])


def test_every_library_is_timed_and_a_failure_is_named(steps):
    def broken(_matrices, _make):
        raise ValueError("it cannot")

    chosen, missing = steps.contenders(["muonsw", "AdamWSW", "schedule_free"])
    assert missing == []
    chosen["broken"] = broken
    rows = steps.measure(steps.listed([(8, 8), (8, 12)]), steps.maker(CPU), CPU, rounds=1, chosen=chosen)
    assert rows.pop("broken") == {"error": "ValueError: it cannot"}
    assert all(0 < row["ms_min"] <= row["ms"] for row in rows.values())
    state = {name: row["state_bytes_per_parameter"] for name, row in rows.items()}
    assert state == pytest.approx({"muonsw": 4, "AdamWSW": 8, "schedule_free": 12}, rel=0.1)
