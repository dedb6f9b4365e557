"""Hash a task and the local modules it imports, found by reading import statements: nothing is executed."""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

INSTALLED = ("site-packages", "dist-packages")
STANDARD_LIBRARY, MUONSW = Path(sysconfig.get_path("stdlib")), Path(__file__).parents[2]


def module_file(name: str) -> Path | None:
    """The file of a dotted module, which is not imported."""
    return next(reversed(list(_files(name.split("."), [Path(place) for place in sys.path]))), None)


def hash_sources(file: Path) -> str:
    """Hash a file and the local modules that it imports, directly or not; installed packages do not count.

    Import statements count wherever they stand in a file. What `importlib` imports by name is not found.
    """
    places = [place for place in map(Path, sys.path) if not _is_installed(place)] + [file.parent]
    sources = [file]
    for source in sources:  # which grows
        for names, beside in _imports(source):
            found = _files(names, places if beside is None else [beside])
            sources += [one for one in map(Path.resolve, found) if one not in sources and MUONSW not in one.parents]
    digest = hashlib.sha256(file.read_bytes())
    for source in sources[1:]:
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()[:16]


def _is_installed(place: Path) -> bool:
    return place.is_relative_to(STANDARD_LIBRARY) or any(name in place.parts for name in INSTALLED)


def _imports(file: Path) -> Iterator[tuple[list[str], Path | None]]:
    """Dotted names that a file imports, in parts, and for a relative import the folder in which it begins."""
    with suppress(SyntaxError, ValueError):  # reported when the file is executed
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                yield from ((alias.name.split("."), None) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                package = node.module.split(".") if node.module else []
                beside = file.parents[node.level - 1] if node.level else None
                yield from (([*package, alias.name], beside) for alias in node.names)


def _files(names: Sequence[str], places: Sequence[Path]) -> Iterator[Path]:
    """The files of a dotted name: its packages, then the module; the last part may be a name inside the module."""
    for name in names:
        files = (file for place in places for file in (place / name / "__init__.py", place / f"{name}.py"))
        yield from [file for file in files if file.is_file()][:1]
        places = [place / name for place in places if (place / name).is_dir()]
