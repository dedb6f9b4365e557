"""The guide's code for each framework runs as it stands."""

import pytest

for package in ("accelerate", "deepspeed", "lightning", "megatron.core", "peft", "timm", "torchtitan", "transformers"):
    pytest.importorskip(package)

from tests.integrations.launching import one_process, sections

SHOWS = {
    "Hugging Face Trainer": lambda scope: len(scope["trainer"].state.log_history) > 3,
    "Accelerate": lambda scope: [r["step"] for r in scope["telemetry"].records] == [1, 5, 10, 15, 20],
    "Lightning": lambda scope: scope["trainer"].global_step == 20,
    "timm": lambda scope: len({g["lr_scale"] for g in scope["by_name"].param_groups}) > 2,
    "torchtitan": lambda scope: [type(optimizer).__name__ for optimizer in scope["optimizers"]] == ["MuonSW"],
    "LoRA with PEFT": lambda scope: {g["algorithm"] for g in scope["optimizer"].param_groups} == {"muon"},
}
ALONE = {"DeepSpeed", "Megatron-Core"}  # DeepSpeed takes the whole process


def test_every_framework_is_run():
    assert set(sections()) == set(SHOWS) | ALONE


@pytest.mark.parametrize("framework", SHOWS)
def test_the_code_runs(framework, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for code in sections()[framework]:
        exec(compile(code, "frameworks.md", "exec"), scope)
    assert SHOWS[framework](scope)


def test_the_code_for_deepspeed_and_megatron_runs(tmp_path):
    result = one_process("run_page.py", "frameworks", tmp_path)
    assert result == {"stage_0": 1, "driven": [0.1, 0.1], "megatron": [0.0, 0.1], "peaks": [0.02]}
