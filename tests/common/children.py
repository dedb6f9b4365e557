"""Child processes, which a test may kill, patch or starve of disk space without harm to other tests.

They are forked from a server that has imported what they need and never run a backward pass: torch refuses to run one
in a fork of a process that has. A child that itself starts children, say in its own mount namespace, forks.
"""

import contextlib
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import cloudpickle
import torch

FAILED = 99

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.distributed.worker", "tests.lab.train.ranks", "tests.faults.commands"])


def start_child(work: Callable[[], int], output: Path) -> BaseProcess:
    """Start a process that ends with the exit code `work` returns; what it prints goes to a file."""
    context = SERVER if multiprocessing.parent_process() is None else multiprocessing.get_context("fork")
    sent = cloudpickle.dumps(work)
    child = context.Process(target=_serve, args=(sent, dict(os.environ), torch.get_num_threads(), output))
    child.start()
    return child


def _serve(sent: bytes, environment: dict[str, str], threads: int, output: Path) -> None:
    """Run the function and exit without clean-up, which could trip over what `work` has broken."""
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    code, stream = FAILED, output.open("w", encoding="utf-8", buffering=1)
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream
    with contextlib.suppress(OSError):  # no room for the traceback
        try:
            code = pickle.loads(sent)()
        except BaseException:
            traceback.print_exc()
        stream.flush()
    os._exit(code)
