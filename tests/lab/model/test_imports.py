"""The model stands alone: of this project it imports itself and what says where kernels run, and otherwise torch."""

import ast
import sys
from pathlib import Path

import muonsw.lab.model

SOURCE = Path(muonsw.lab.model.__file__).parent


def imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            yield from ([f"muonsw.{alias.name}" for alias in node.names] if node.module == "muonsw" else [node.module])


def test_the_model_never_imports_the_optimizer():
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 5
    for path in files:
        for name in imports(path):
            known = name.split(".")[0] in {*sys.stdlib_module_names, "torch"}
            known |= name == "muonsw.kernels" or (path.name == "kernels.py" and name.split(".")[0] == "triton")
            assert known or name.startswith("muonsw.lab.model."), f"{path.name} imports {name}"
