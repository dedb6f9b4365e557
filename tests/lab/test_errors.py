"""A rank exits cleanly."""

import os
import subprocess
import sys

import pytest

from tests.lab.train.ranks import free_port

# Rank 0 exits while a gloo thread waits for the GIL, to release a tensor of a finished collective.
ENDING = """
import atexit, os, sys, time
import torch, torch.distributed as dist
from muonsw.lab.errors import end

def keep_the_lock():
    end = time.monotonic() + 3
    while time.monotonic() < end:
        pass

dist.init_process_group("gloo")
if os.environ["RANK"] == "1":
    time.sleep(1)
    dist.all_reduce(torch.ones(8))
    os._exit(0)
dist.all_reduce(torch.ones(8), async_op=True)
sys.setswitchinterval(1000)
atexit.register(keep_the_lock)
atexit.register(print, "printed at exit")
print("done", end=" ")
end(5)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="gloo's threads, as on Linux")
def test_a_rank_ends_with_its_code_whatever_threads_of_gloo_still_do():
    port = str(free_port())
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command, pipes = [sys.executable, "-c", ENDING], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [subprocess.Popen(command, env={**env, "RANK": rank}, text=True, **pipes) for rank in "01"]
    (printed, errors), _ = [rank.communicate(timeout=120) for rank in ranks]
    assert ranks[0].returncode == 5, errors
    assert printed == "done printed at exit\n"
