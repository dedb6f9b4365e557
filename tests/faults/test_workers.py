"""No worker of `muonsw reproduce theory` outlives the command, and a killed one is reported in a sentence."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.lab.test_launch import IN_PROC, assert_gone, children_of

COMMAND = [sys.executable, "-m", "muonsw", "reproduce", "theory", "--processes", "2", "--out"]


def told_of(process, what):
    """A file that the system has on a process, such as its command line; empty once it has ended."""
    try:
        with open(f"/proc/{process}/{what}", encoding="utf-8") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def workers_of(parent):
    """Its workers once both have loaded torch: before that Python itself reports a parent that is gone.

    The third child of the pool only keeps count of shared memory.
    """
    deadline = time.monotonic() + 60.0
    while True:
        found = [child for child in children_of(parent) if "spawn_main" in told_of(child, "cmdline")]
        if len(found) == 2 and all("libtorch" in told_of(child, "maps") for child in found):
            return found
        assert parent.poll() is None
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.05)


@IN_PROC
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 143, "muonsw: stopped; nothing is kept\n"),
        (signal.SIGHUP, 129, "muonsw: stopped; nothing is kept\n"),
        (signal.SIGINT, 130, "muonsw: stopped; nothing is kept\n"),
        (signal.SIGKILL, -9, ""),
    ],
)
def test_the_workers_end_with_the_command(tmp_path, number, code, said):
    with subprocess.Popen([*COMMAND, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        workers = workers_of(parent)
        parent.send_signal(number)
        _, errors = parent.communicate(timeout=60)
    assert parent.returncode == code
    assert errors == said or code == -signal.SIGKILL, "Python itself reports semaphores of a killed parent"
    assert_gone(workers)


@IN_PROC
@pytest.mark.slow
def test_a_killed_worker_is_reported_in_a_sentence(tmp_path):
    with subprocess.Popen([*COMMAND, tmp_path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        workers = workers_of(parent)
        os.kill(int(workers[0]), signal.SIGKILL)
        _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 3
    assert "the worker was killed; run fewer at a time" in errors
    assert "Traceback" not in errors
    assert_gone(workers)
