"""What modules import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import muonsw
from muonsw import machine

SOURCE = Path(muonsw.__file__).parent
BENCH = Path(__file__).parents[1] / "bench"
STANDARD = sys.stdlib_module_names

# Modules that need another package; nothing else imports them.
NEEDS_A_PACKAGE = {
    "integrations/transformers.py": "transformers",
    "integrations/lightning.py": "lightning",
    "integrations/timm.py": "timm",
    "integrations/torchtitan.py": "torchtitan",
}


def imports(path):
    """The modules that a file imports, also inside functions, and the names that it takes from them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides the module"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_the_library_needs_torch_alone_and_never_the_lab():
    for path in SOURCE.rglob("*.py"):
        place = path.relative_to(SOURCE)
        if "lab" in place.parts:
            continue
        allowed = {
            "torch",
            "muonsw",
            "triton" if "kernels" in place.parts else None,
            NEEDS_A_PACKAGE.get(place.as_posix()),
        }
        for name in imports(path):
            root = name.split(".")[0]
            assert root in STANDARD or root in allowed, f"{path.name} imports {name}"
            assert not name.startswith("muonsw.lab"), f"{path.name} imports the lab"


def test_nothing_imports_a_module_that_needs_another_package():
    special = {"muonsw." + place.removesuffix(".py").replace("/", ".") for place in NEEDS_A_PACKAGE}
    for path in SOURCE.rglob("*.py"):
        assert not special & set(imports(path)), path.name


def test_importing_the_library_loads_only_what_torch_loads():
    """Not even torch's compiler or DTensors, which take longer to import than the library."""
    code = (
        "import sys, torch; before = set(sys.modules); from muonsw import *; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(ast.literal_eval(printed)) - set(STANDARD) == {"muonsw"}


def test_training_needs_neither_the_command_line_nor_the_report():
    """So a source tree trains on a machine where nothing can be installed."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['tyro', 'plotly', 'orjson', 'jinja2', 'datasets'])); "
        "import muonsw.lab.train.loop, muonsw.lab.launch, muonsw.lab.train.export"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_found_where_a_type_checker_finds_them():
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "muonsw." in node.module]
    homes = {alias.asname: node.module.removeprefix("muonsw.") for node in imported for alias in node.names}
    assert homes == muonsw._HOMES
    assert set(muonsw.__all__) <= set(dir(muonsw))


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_command_line_introduces_itself_without_torch(option):
    pytest.importorskip("tyro")  # the lab's
    code = f"import sys; from muonsw.lab.cli import main; main(['{option}']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert "muonsw" in done.stdout


@pytest.mark.parametrize("path", sorted(BENCH.glob("*.py")), ids=lambda path: path.name)
def test_bench_scripts_find_their_imports(path, monkeypatch):
    """They run rarely, by hand."""
    if path.name == "kernel_time.py" and not machine.triton():
        pytest.skip("it times Triton's kernels, and Triton is not installed")
    monkeypatch.syspath_prepend(BENCH)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    own_imports = [node for node in imports if str(node.module).split(".")[0] in ("muonsw", "timing")]
    for node in own_imports:
        exec(compile(ast.unparse(node), path.name, "exec"), {})
    assert own_imports
