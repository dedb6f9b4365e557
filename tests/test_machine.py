"""One place asks what the machine has, and can be answered for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import muonsw
from muonsw import machine
from tests.other_machine import other_answers

SOURCE = Path(muonsw.__file__).parent
# Ways to ask about hardware and installed packages.
ASKING = (
    r"is_available\(|device_count\(|get_device_capability\(|is_bf16_supported\(|_is_amx|_is_avx|torch\.backends"
    r"|find_spec\(|cpu_count\(|sched_getaffinity\(|getlocale|getpreferredencoding|\.isatty\("
)


def test_nothing_else_in_the_source_asks():
    asking = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(ASKING, path.read_text(encoding="utf-8"))
    }
    assert asking == {"machine.py"}


@pytest.mark.parametrize("name", machine.QUESTIONS)
def test_a_test_can_answer(name, monkeypatch):
    given = (torch.device("cpu"),) if name == "gpu_capability" else ()
    monkeypatch.setitem(machine.FORCED, name, 70)
    assert getattr(machine, name)(*given) == 70


def test_a_variable_answers_for_a_process():
    code = "from muonsw import machine; print(machine.cores(), machine.fast_bfloat16())"
    environment = {**os.environ, machine.VARIABLE: "cores=77 fast_bfloat16=1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["77", "1"]


@pytest.mark.parametrize("text", ["core=1", "cores", "cores=", "cores=-1", "cores=yes"])
def test_an_answer_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"MUONSW_MACHINE holds {text!r}; write name=number")):
        machine.read_forced(text)


def test_the_other_machine_has_other_answers():
    other = other_answers()
    assert bool(other["fast_bfloat16"]) != bool(machine.fast_bfloat16())
    assert other["cores"] != machine.cores()
