"""DeepSpeed, for real, on the CPU: what runs in it, what is refused, and its own Muon with our decay."""

import pytest

pytest.importorskip("deepspeed")

from tests.integrations.launching import one_process


def test_without_zero_our_optimizer_takes_the_steps_of_a_plain_loop_and_resumes(tmp_path):
    result = one_process("with_deepspeed.py", "stage_0", tmp_path)
    assert result == {"plain": True, "resumed": True, "peaks": [0.02], "matrices": 2}


def test_under_zero_muon_says_that_its_matrices_are_gone_and_adamw_works(tmp_path):
    result = one_process("with_deepspeed.py", "zero", tmp_path)
    assert result["refused"] == [True, True, True]
    assert result["adamw_off_by"] < 1e-6  # the same entries in another order, in float32


def test_its_own_muon_follows_the_rule_under_zero(tmp_path):
    result = one_process("with_deepspeed.py", "own_muon", tmp_path)
    assert result["equal"] == [True, True, True]
    assert result["decays"] == [[0.025, 0.025]] * 3
