"""Run a script of this folder in separate processes, over gloo, and read the result that rank 0 wrote."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def two_processes(what, folder):
    """Run `two_processes.py what folder` under torchrun; return the `result.json` of rank 0."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
    return one_process("two_processes.py", what, folder, launcher)


def one_process(script, what, folder, launcher=()):
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


def deepspeed_on_the_cpu():
    """Set up one process, without the operator that DeepSpeed compiles for shared memory."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.update({**alone, "DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo", "TORCHDYNAMO_DISABLE": "1"})
    from deepspeed.comm.comm import TorchBackend

    sys.modules[TorchBackend.__module__].build_shm_op = lambda: None  # deepspeed.comm.torch is torch itself


def sections():
    """Return the guide's code blocks by framework."""
    text = (ROOT / "docs" / "guide" / "frameworks.md").read_text(encoding="utf-8")
    parts = (part.partition("\n") for part in text.split("\n## ")[1:])
    return {title: re.findall(r"```python\n(.*?)```", body, re.DOTALL) for title, _, body in parts}
