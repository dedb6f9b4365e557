"""The README's example runs as it stands, and is as short as it says."""

import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_usage_example_runs_in_twelve_lines(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    scope = {}
    exec(compile(code, "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert "embedding" in printed
    assert "muon" in printed
    assert scope["optimizer"].param_groups[0]["resolved_peak_lr"] == 0.02


def test_the_design_page_names_every_module():
    text = (README.parent / "docs" / "design.md").read_text(encoding="utf-8")
    source = README.parent / "src" / "muonsw"
    for path in source.iterdir():
        if path.name.startswith("_") or path.name == "py.typed":
            continue
        assert path.name + ("/" if path.is_dir() else "") in text, path.name
