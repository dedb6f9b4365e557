"""The lab is one ladder: a folder imports only from itself and from what stands above it in this list."""

import ast
from pathlib import Path

import pytest

import muonsw.lab

LADDER = (
    "errors",
    "files",
    "config",
    "console",
    "paper",
    "stats",
    "theory",
    "advise",
    "data",
    "model",
    "task_template",
    "tasks",
    "train",
    "launch",
    "plan",
    "runs",
    "charts",
    "report",
    "compare",
    "diagnose",
    "studies",
    "commands",
    "cli",
)
LAB = Path(muonsw.lab.__file__).parent
FOLDERS = sorted(path.stem for path in LAB.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())


def files_of(folder):
    return sorted((LAB / folder).rglob("*.py")) if (LAB / folder).is_dir() else [LAB / f"{folder}.py"]


def folders_imported_by(path):
    """The folders that a file imports from, inside functions and in `from muonsw.lab import folder` too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively, which hides the folder"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[2] for name in names if name.startswith("muonsw.lab."))


def test_every_folder_has_its_rung():
    assert set(FOLDERS) - {"__init__"} == set(LADDER)


@pytest.mark.parametrize("folder", LADDER)
def test_a_folder_imports_nothing_from_below(folder):
    below = set(LADDER[LADDER.index(folder) + 1 :])
    for path in files_of(folder):
        found = below.intersection(folders_imported_by(path))
        assert not found, f"{path.relative_to(LAB)} imports from {sorted(found)}, which stand on {folder}"


def test_an_import_upwards_is_seen_in_all_its_forms(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import muonsw.lab.studies.study\nfrom muonsw.lab import report\n"
        "def late():\n    from muonsw.lab.commands.training import Train\n",
        encoding="utf-8",
    )
    assert set(folders_imported_by(path)) == {"studies", "report", "commands"}
