"""The code on the pages of the guide runs as it stands, page by page."""

import re
from pathlib import Path

import pytest

for package in ("accelerate", "deepspeed", "lightning", "megatron.core", "peft", "timm", "torchtitan", "transformers"):
    pytest.importorskip(package)

from tests.integrations.launching import one_process

ALONE = "megatron-deepspeed"  # DeepSpeed takes the whole process
PAGES = sorted((Path(__file__).parents[2] / "docs" / "guide" / "frameworks").glob("*.md"))
SHOWS = {
    "trainer": lambda scope: len(scope["trainer"].state.log_history) > 3,
    "accelerate": lambda scope: [r["step"] for r in scope["telemetry"].records] == [1, 5, 10, 15, 20],
    "lightning": lambda scope: scope["trainer"].global_step == 20,
    "timm": lambda scope: {g["resolved_peak_lr"] for g in scope["optimizer"].param_groups} > {0.01},
    "torchtitan": lambda scope: [type(o).__name__ for o in (scope["muon"], scope["adamw"])] == ["MuonSW", "AdamW"],
    "lora": lambda scope: {g["algorithm"] for g in scope["optimizer"].param_groups} == {"muon"},
}


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != ALONE], ids=lambda page: page.stem)
def test_the_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for code in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, page.name, "exec"), scope)
    assert SHOWS[page.stem](scope)


def test_the_code_for_deepspeed_and_megatron_runs(tmp_path):
    result = one_process("run_page.py", ALONE, tmp_path)
    assert result == {"stage_0": 1, "driven": [0.1, 0.1], "megatron": [0.0, 0.1], "peaks": [0.02]}
