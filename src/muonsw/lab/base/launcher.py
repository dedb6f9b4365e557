"""A process that torchrun (or anything like it) has started as one rank of many: how it is known, reports and ends."""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

# What a launcher sets for every process that it starts.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Where torchrun looks for the reason of a failure.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


def is_rank() -> bool:
    """Whether a launcher has started this process as one of several."""
    return all(name in os.environ for name in VARIABLES)


def report_error(sentence: str) -> None:
    """Hand the reason of a failure to torchrun, which prints it last, after the traceback of its own."""
    if path := os.environ.get(ERROR_FILE):
        content = {"message": {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with suppress(OSError):
            Path(path).write_text(json.dumps(content), encoding="utf-8")


def end(code: int) -> NoReturn:
    """Exit with a code; a rank does so without taking Python down, as processes of `multiprocessing` do.

    Threads of gloo outlive `destroy_process_group` wherever a mesh or a layer still refers to the group. One that lets
    go of the tensors of a finished collective takes Python's lock for it. If Python is being taken down, that ends the
    thread inside C++ code which may not be left in this way, and the process with SIGABRT.
    """
    if not is_rank():
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
