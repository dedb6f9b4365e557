"""One of the scripts in this folder in processes of its own, over gloo, and what rank 0 wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def two_processes(script, what, folder):
    """Run `script what folder` twice at once; the content of the `result.json` that it leaves in the folder."""
    return _result(["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"], script, what, folder)


def one_process(script, what, folder):
    """The same in one process of its own."""
    return _result([], script, what, folder)


def _result(launcher, script, what, folder):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(HERE / script), what, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-5000:]
    return json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
