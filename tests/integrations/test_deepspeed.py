"""DeepSpeed on the CPU: our optimizers in it, and its own Muon with our decay."""

import pytest

pytest.importorskip("deepspeed")

from tests.integrations.launching import one_process


def test_without_zero_steps_equal_a_plain_loop_and_resume(tmp_path):
    result = one_process("with_deepspeed.py", "stage_0", tmp_path)
    assert result == {"plain": True, "resumed": True, "peaks": [0.02], "matrices": 2}


def test_under_zero_muon_is_refused_and_adamw_works(tmp_path):
    assert one_process("with_deepspeed.py", "zero", tmp_path) == {"refused": [True, True, True]}


def test_its_own_muon_follows_the_rule_under_zero(tmp_path):
    result = one_process("with_deepspeed.py", "own_muon", tmp_path)
    assert result == {"equal": [True, True, True], "decays": [[0.025, 0.025]] * 3}
