"""Two processes under each framework, over gloo: DistributedDataParallel, then FSDP2."""

import pytest

for package in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(package)

from tests.integrations.launching import two_processes

MATRICES = {"transformers": 7, "transformers-experts": 12, "accelerate": 7, "lightning": 1}


@pytest.mark.parametrize("framework", ["transformers", "accelerate", "lightning"])
def test_both_processes_end_with_the_same_weights(tmp_path, framework):
    result = two_processes(f"ddp-{framework}", tmp_path)
    assert result == {"equal": True, "peaks": [0.02], "matrices": MATRICES[framework]}


@pytest.mark.parametrize("framework", MATRICES)
def test_sharded_weights_are_those_of_a_plain_loop_and_resume_bit_for_bit(tmp_path, framework):
    result = two_processes(framework, tmp_path)
    assert result.pop("off_by") < 1e-4  # rounding in float32: 0 under Lightning, 2e-6 for experts, else 7e-7
    assert result == {
        "sharded": True,
        "resumed": True,
        "resumed_peaks": [0.02],
        "peaks": [0.02],
        "matrices": MATRICES[framework],
        "sampled": [1, 2, 4, 6] if "transformers" in framework else [1, 2, 4],
    }
