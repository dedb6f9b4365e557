"""The lab is one ladder: a module imports only from itself and from those above it in this list."""

from pathlib import Path

import pytest

import muonsw.lab
from tests.test_architecture import imports

LADDER = (
    "errors", "files", "options", "config", "console", "paper", "stats", "theory", "advise", "data", "model",
    "task_template", "tasks", "train", "launch", "plan", "runs", "charts", "report", "compare", "diagnose", "studies",
    "commands", "cli",
)  # fmt: skip
LAB = Path(muonsw.lab.__file__).parent


def test_every_module_has_its_rung():
    modules = {path.stem for path in LAB.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules - {"__init__"} == set(LADDER)


@pytest.mark.parametrize("module", LADDER)
def test_a_module_imports_nothing_from_below(module):
    below = set(LADDER[LADDER.index(module) + 1 :])
    for path in [LAB / f"{module}.py", *(LAB / module).rglob("*.py")]:
        if path.exists():
            ours = (name.split(".") for name in imports(path) if name.startswith("muonsw.lab."))
            assert not below.intersection(parts[2] for parts in ours), path
