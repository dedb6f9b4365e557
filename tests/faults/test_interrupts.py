"""An interrupt ends a command with one line, whenever it comes."""

import signal
import subprocess
import sys

import pytest

from tests.faults.folders import folders

RUN_TWICE = """
import os, signal, sys
from muonsw.lab.train import loop
real = loop.Training.update
def update(self, *arguments, **options):
    for _ in range(TIMES):
        os.kill(os.getpid(), signal.SIGINT)
    return real(self, *arguments, **options)
loop.Training.update = update
from muonsw.lab.run import main
sys.exit(main())
"""


AT_START = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # programs that a script starts with & ignore it
class Finder:
    def find_spec(self, name, *_):
        if name == "muonsw.lab.train.loop":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from ENTRY import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "said"),
    [
        (RUN_TWICE.replace("TIMES", "1"), "stopped after 1 of 6 updates, saved"),
        (RUN_TWICE.replace("TIMES", "2"), "interrupted"),
        (AT_START.replace("ENTRY", "muonsw.lab.run"), "interrupted"),
        (AT_START.replace("ENTRY", "muonsw.lab.cli"), "interrupted"),
    ],
    ids=["once", "twice", "while run loads", "while the command line loads"],
)
def test_an_interrupt_at_any_time_is_reported_in_a_line(program, said, tmp_path):
    arguments = [folders().whole / "config.json", tmp_path / "run"]
    if "cli" in program:
        arguments = ["train", "--config", arguments[0], "--out", arguments[1]]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr.startswith(f"muonsw: {said}")
    assert done.stderr.count("\n") == 1
