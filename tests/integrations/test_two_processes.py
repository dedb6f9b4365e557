"""Two processes under each framework, for real, over gloo: DistributedDataParallel, then FSDP2."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(package)

from tests.integrations.launching import two_processes

SAMPLED = {"transformers": [1, 2, 4, 6], "accelerate": [1, 2], "lightning": [1, 2, 4]}
MATRICES = {"transformers": 7, "transformers-experts": 12, "accelerate": 7, "lightning": 1}


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("transformers", marks=pytest.mark.works("Trainer", "two processes (DDP)")),
        pytest.param("accelerate", marks=pytest.mark.works("Accelerate", "two processes (DDP)")),
        pytest.param("lightning", marks=pytest.mark.works("Lightning", "two processes (DDP)")),
    ],
)
def test_both_processes_end_with_the_same_weights(tmp_path, framework):
    result = two_processes("two_processes.py", framework, tmp_path)
    expected = {"ranks": 2, "equal": True, "peaks": [0.02], "matrices": MATRICES[framework]}
    assert result == {**expected, "sampled": SAMPLED[framework]}


SHARDED_SAMPLED = {
    "transformers": [1, 2, 4, 6],
    "transformers-experts": [1, 2, 4, 6],
    "accelerate": [1, 2, 4],
    "lightning": [1, 2, 4],
}


@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("transformers", marks=pytest.mark.works("Trainer", "FSDP2")),
        pytest.param("transformers-experts", marks=pytest.mark.works("Trainer", "FSDP2")),
        pytest.param("accelerate", marks=pytest.mark.works("Accelerate", "FSDP2")),
        pytest.param("lightning", marks=pytest.mark.works("Lightning", "FSDP2")),
    ],
)
def test_sharded_weights_are_those_of_a_plain_loop_and_resume_bit_for_bit(tmp_path, framework):
    """What each number means is said where it is measured, in `sharded.py`."""
    result = two_processes("sharded.py", framework, tmp_path)
    assert result.pop("off_by") < 1e-4  # rounding in float32: 0 under Lightning, 2e-6 for experts, 7e-7 else
    assert result == {
        "sharded": True,
        "resumed": True,
        "resumed_peaks": [0.02],
        "peaks": [0.02],
        "matrices": MATRICES[framework],
        "sampled": SHARDED_SAMPLED[framework],
    }


@pytest.mark.parametrize("setting", ["full", "bf16"])
def test_fsdp2_with_whole_checkpoints_and_in_mixed_precision(tmp_path, setting):
    result = two_processes("sharded.py", f"accelerate-{setting}", tmp_path)
    assert result["sharded"]
    assert result["resumed"]
    assert result["resumed_peaks"] == [0.02]


LAUNCHERS = {"torchrun": "torch.distributed.run", "accelerate launch": "accelerate.commands.launch"}
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "frameworks" / "trainer.md"
LINES = re.findall(r"^\$ (torchrun|accelerate launch) (.*) train.py$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("launcher", "options"), LINES)
def test_the_lines_of_the_page_start_two_processes(tmp_path, launcher, options):
    script = tmp_path / "train.py"
    script.write_text(
        "from accelerate import PartialState\nprint(f'world {PartialState(cpu=True).num_processes}\\n', end='')",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", LAUNCHERS[launcher], *options.split(), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.stdout.count("world 2") == 2, done.stderr[-3000:]


def test_the_page_has_both_lines():
    assert [launcher for launcher, _ in LINES] == list(LAUNCHERS)
