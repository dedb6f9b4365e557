"""Rules that the source keeps."""

import ast
import inspect
import re
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import muonsw

SOURCE = Path(muonsw.__file__).parent

# Functions whose result depends on torch's default dtype or device unless both are given.
MAKERS = {
    *("arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "from_numpy", "full", "linspace", "logspace"),
    *("normal", "ones", "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}


def files(*, lab):
    """The source of the library, with `lab` also of the lab, where our own programs set torch's defaults."""
    return [path for path in sorted(SOURCE.rglob("*.py")) if lab or "lab" not in path.relative_to(SOURCE).parts]


def calls(path, *words):
    """The calls of a file, if it has one of these words."""
    text = path.read_text(encoding="utf-8")
    wanted = any(word in text for word in words)
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)] if wanted else []


def test_no_tensor_is_made_without_its_dtype_and_device():
    """Users set torch's defaults: LLM code its dtype, notebooks its device."""
    actual = [
        f"{path.relative_to(SOURCE)}:{call.lineno}: {ast.unparse(call)}"
        for path in files(lab=False)
        for call in calls(path, "torch.")
        if isinstance(call.func, ast.Attribute)
        and ast.unparse(call.func.value) == "torch"
        and call.func.attr in MAKERS
        and not {"dtype", "device"} <= {keyword.arg for keyword in call.keywords}
    ]
    assert not actual


def test_triton_kernels_are_launched_in_one_place():
    """`kernel[grid](...)` launches on the current device, not on that of its arguments."""
    actual = [
        f"{path.relative_to(SOURCE)}:{call.lineno}"
        for path in files(lab=True)
        if "import triton" in path.read_text(encoding="utf-8") or path.parent.name == "kernels"
        for call in calls(path, "](")
        if isinstance(call.func, ast.Subscript) and isinstance(call.func.value, ast.Name)
    ]
    assert actual
    assert {place.split(":")[0] for place in actual} == {"kernels/__init__.py"}


def opens_text(call):
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    return name in ("read_text", "write_text") or (name == "open" and ast.unparse(call.func) == "open")


def test_text_files_are_read_and_written_in_utf_8():
    """Without an encoding Python takes the locale's, which in a container is often ASCII."""
    root = Path(__file__).parents[1]
    actual = [
        f"{path.relative_to(root)}:{call.lineno}"
        for folder in (SOURCE, root / "tests", root / "bench", root / "examples")
        for path in sorted(folder.rglob("*.py"))
        for call in calls(path, "_text", "open")
        if opens_text(call) and "utf-8" not in ast.unparse(call)
    ]
    assert not actual


def test_public_names_and_their_public_methods_are_documented():
    bare = []
    for name in set(muonsw.__all__) - {"__version__"}:
        thing = getattr(muonsw, name)
        members = vars(thing).items() if isinstance(thing, type) else ()
        parts = {name: thing} | {f"{name}.{key}": member for key, member in members if key[0] != "_"}
        bare += [key for key, part in parts.items() if callable(part) and not inspect.getdoc(part)]
    assert not bare


# Queries of hardware and installed packages.
QUERIES = (
    r"is_available\(|device_count\(|get_device_capability\(|is_bf16_supported\(|_is_amx|_is_avx|torch\.backends"
    r"|find_spec\(|cpu_count\(|sched_getaffinity\(|getlocale|getpreferredencoding|\.isatty\("
)


def test_one_module_queries_the_machine():
    """So tests can patch its answers."""
    querying = [path for path in files(lab=True) if re.search(QUERIES, path.read_text(encoding="utf-8"))]
    assert querying == [SOURCE / "machine.py"]


def private_names_of_torch():
    for path in files(lab=True):
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
    """Also names for devices that are not tested."""
    names = set(private_names_of_torch())
    assert {"torch._foreach_norm", "torch._compile._disable_dynamo", "torch._fused_adamw_"} <= names
    assert [name for name in names if not has(name)] == []
    assert not has("torch._foreach_gone_")
