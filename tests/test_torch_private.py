"""Private names of torch: all of them are in one table, and the installed torch has them."""

import ast
from pathlib import Path

import pytest
import torch

import muonsw
from tests import torch_private
from tests.torch_private import ARGUMENTS, ATTRIBUTES, NAMES, OVERRIDDEN, PROBED, missing

SOURCE = Path(muonsw.__file__).parent
# Not torch's: a named tuple's, the system's exit and Python's functions at exit, a pattern of tiktoken's, what
# torchtitan leaves to its subclasses.
OTHERS = {
    "_replace",
    "_asdict",
    "_fields",
    "_exit",
    "_run_exitfuncs",
    "_pat_str",
    "_post_init",
    "_resolve_optimizer_factory",
    "_validate_params",
}


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


@pytest.fixture(scope="module")
def nodes():
    """All of our source."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")]
    return [node for tree in trees for node in ast.walk(tree)]


def defined(nodes):
    """Names that our own source gives to something."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_self = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
            if isinstance(node, ast.Name) or is_self:
                yield node.id if isinstance(node, ast.Name) else node.attr


def used(nodes):
    """Private names that the source uses: with their module, or as they are for attributes and arguments."""
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name for name in names if any(map(is_private, name.split("."))))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            dotted = ast.unparse(node)
            yield dotted if dotted.startswith("torch.") else node.attr
        elif isinstance(node, ast.keyword) and node.arg and is_private(node.arg):
            yield node.arg


def probed(nodes):
    """Private names in strings that `getattr` and `hasattr` are given, or that name a probe."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_private(node.value):
            yield node.value


def test_the_table_lists_what_is_asked_for_by_a_string(nodes):
    asked = {
        argument.value
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        for argument in node.args[1:2]
        if isinstance(argument, ast.Constant) and is_private(argument.value)
    }
    assert asked <= PROBED.keys() | set(defined(nodes)), "add these to PROBED in tests/torch_private.py"
    assert PROBED.keys() <= set(probed(nodes)), "these are no longer asked for: delete them"


def test_the_table_lists_what_is_overridden():
    ours = {name for name in vars(muonsw.ScaledDecayOptimizer) if is_private(name)}
    assert ours & set(dir(torch.optim.Optimizer)) == OVERRIDDEN.keys()


def test_the_installed_torch_has_every_private_name_we_use():
    assert not missing()


def test_the_table_lists_what_the_source_uses(nodes):
    listed = {*NAMES, *ARGUMENTS, *(name for names in ATTRIBUTES.values() for name in names)}
    found = set(used(nodes)) - set(defined(nodes)) - OTHERS
    assert not found - listed, "add these to tests/torch_private.py, or do without them"
    assert not listed - found, "these are no longer used: delete them from tests/torch_private.py"


def test_a_name_that_torch_has_lost_is_reported(monkeypatch):
    monkeypatch.setattr(torch_private, "NAMES", {"torch._foreach_gone_": "", "torch._no_module.name": ""})
    monkeypatch.setattr(torch_private, "ATTRIBUTES", {"optimizer": {"_lost": ""}})
    monkeypatch.setattr(torch_private, "OVERRIDDEN", {"_no_method": ""})
    monkeypatch.setattr(torch_private, "PROBED", {"_no_probe": ("torch.cpu", "")})
    monkeypatch.setattr(torch_private, "ARGUMENTS", {"_never": ""})
    assert missing() == [
        "torch._foreach_gone_",
        "torch._no_module.name",
        "optimizer._lost",
        "Optimizer._no_method",
        "torch.cpu: _no_probe",
        "Embedding(_never=)",
    ]
