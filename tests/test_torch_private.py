"""The installed torch has every private name that the source reaches through a module, also on devices not tested."""

import ast
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import muonsw

SOURCE = Path(muonsw.__file__).parent


def private_names_of_torch():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
                names = [ast.unparse(node)]
            yield from (name for name in names if "._" in name and "(" not in name and ".__" not in name)


def has(name):
    module, _, attribute = name.rpartition(".")
    try:
        attrgetter(attribute)(import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


def test_the_installed_torch_has_every_private_name_we_use():
    names = set(private_names_of_torch())
    assert {"torch._foreach_norm", "torch._compile._disable_dynamo", "torch._fused_adamw_"} <= names
    assert [name for name in names if not has(name)] == []
    assert not has("torch._foreach_gone_")
