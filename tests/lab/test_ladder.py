"""The lab is one ladder: a module imports only from itself and from those above it in this list."""

import ast
from pathlib import Path

import pytest

import muonsw.lab

LADDER = (
    "errors", "files", "options", "config", "console", "paper", "stats", "theory", "advise", "data", "model",
    "task_template", "tasks", "train", "launch", "plan", "runs", "charts", "report", "compare", "diagnose", "studies",
    "commands", "cli",
)  # fmt: skip
LAB = Path(muonsw.lab.__file__).parent


def imports(source):
    """The modules of the lab that a source file imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides the module"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[2] for name in names if name.startswith("muonsw.lab."))


def test_every_module_has_its_rung():
    modules = {path.stem for path in LAB.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert modules - {"__init__"} == set(LADDER)


@pytest.mark.parametrize("module", LADDER)
def test_a_module_imports_nothing_from_below(module):
    below = set(LADDER[LADDER.index(module) + 1 :])
    for path in [LAB / f"{module}.py", *(LAB / module).rglob("*.py")]:
        if path.exists():
            assert not below.intersection(imports(path.read_text(encoding="utf-8"))), path
