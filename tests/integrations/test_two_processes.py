"""Two processes under each framework, for real, over gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[2]
SAMPLED = {"transformers": [1, 2, 4, 6], "accelerate": [1, 2], "lightning": [1, 2, 4]}
MATRICES = {"transformers": 7, "accelerate": 7, "lightning": 1}


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("transformers", marks=pytest.mark.works("Trainer", "two processes (DDP)")),
        pytest.param("accelerate", marks=pytest.mark.works("Accelerate", "two processes (DDP)")),
        pytest.param("lightning", marks=pytest.mark.works("Lightning", "two processes (DDP)")),
    ],
)
def test_both_processes_end_with_the_same_weights(tmp_path, framework):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("two_processes.py")), framework, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text())
    expected = {"ranks": 2, "equal": True, "peaks": [0.02], "matrices": MATRICES[framework]}
    assert result == {**expected, "sampled": SAMPLED[framework]}
