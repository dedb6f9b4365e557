"""One place asks what the machine has, and tests can answer for it."""

import re
from pathlib import Path

import pytest
import torch

import muonsw
from muonsw import machine
from tests.other_machine import other_answers, pretend

SOURCE = Path(muonsw.__file__).parent
# Ways to ask about hardware and installed packages.
ASKING = (
    r"is_available\(|device_count\(|get_device_capability\(|is_bf16_supported\(|_is_amx|_is_avx|torch\.backends"
    r"|find_spec\(|cpu_count\(|sched_getaffinity\(|getlocale|getpreferredencoding|\.isatty\("
)


def test_nothing_else_in_the_source_probes_the_machine():
    asking = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if re.search(ASKING, path.read_text(encoding="utf-8"))
    }
    assert asking == {"machine.py"}


def test_pretended_answers_replace_the_machines(monkeypatch):
    pretend("cores=77 fast_bfloat16=1 gpu_capability=70", monkeypatch)
    assert (machine.cores(), machine.fast_bfloat16(), machine.gpu_capability(torch.device("cpu"))) == (77, 1, 70)
    with pytest.raises(AttributeError, match="no attribute 'core'"):
        pretend("core=1", monkeypatch)


def test_the_other_machine_has_other_answers():
    other = other_answers()
    assert bool(other["fast_bfloat16"]) != bool(machine.fast_bfloat16())
    assert other["cores"] != machine.cores()
