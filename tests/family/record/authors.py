"""Parts of the authors' files, run without their imports, and in float64 where they cast to something narrower."""

import ast
import json
import subprocess
from pathlib import Path

import torch

RECORDED = Path(__file__).parent.parent / "recorded"
_WIDER = {".bfloat16()": ".double()", ".float()": ".double()", "torch.bfloat16": "torch.float64"}
_WIDER |= {"torch.float32": "torch.float64"}


class Clone:
    """A file of a repository at one commit; `folder` holds its clone as `<owner>+<name>/repo` or as `<name>`."""

    def __init__(self, folder, repository, commit, path):
        git = Path(folder, repository.replace("/", "+"), "repo")
        git = git if git.exists() else Path(folder, repository.split("/")[1])
        self.source = {"repository": repository, "commit": commit, "file": path}
        self.text = subprocess.check_output(["git", "-C", git, "show", f"{commit}:{path}"], text=True)

    def load(self, *names, wide=True, **given):
        """Functions, classes and constants of the file by name, without their decorators."""
        text = self.text
        for narrow, wider in _WIDER.items() if wide else ():
            text = text.replace(narrow, wider)
        nodes = [node for node in ast.parse(text).body if set(_names(node)) & set(names)]
        for node in nodes:
            if not isinstance(node, ast.Assign):
                node.decorator_list = []
        module = ast.fix_missing_locations(ast.Module([_ANNOTATIONS, *nodes], []))
        space = {"torch": torch, "Tensor": torch.Tensor, **given}
        exec(compile(module, self.source["file"], "exec"), space)
        return [space[name] for name in names]


_ANNOTATIONS = ast.parse("from __future__ import annotations").body[0]


def _names(node):
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def save(name, record):
    (RECORDED / f"{name}.json").write_text(json.dumps(record, default=torch.Tensor.tolist) + "\n", encoding="utf-8")
