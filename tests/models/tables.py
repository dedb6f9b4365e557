"""Expected roles and matrix views of parameters, as text.

A table is a section of a file in `tables/`, named `[model]`, with lines of the form `role (view): pattern pattern`.
The first pattern that matches a name decides. `role|role` allows either where the difference is a matter of taste,
never where it changes the algorithm. A line that starts with `#` is a comment.
"""

import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "tables"
LINE = re.compile(r"^(?P<roles>[a-z|]+)(?: \((?P<view>[^)]*)\))?: (?P<patterns>.+)$")


class Expected(NamedTuple):
    """One pattern of a table, with its roles and matrix view."""

    pattern: str
    roles: tuple[str, ...]
    view: str


def read_tables(file):
    """Read the tables of a file, by model."""
    tables = {}
    for line in (FOLDER / f"{file}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            current = tables.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            actual = LINE.match(line)
            assert actual, f"{file}.txt: cannot read {line!r}"
            roles = tuple(actual["roles"].split("|"))
            current.extend(Expected(p, roles, actual["view"] or _usual_view(roles)) for p in actual["patterns"].split())
    return tables


def _usual_view(roles):
    return "flatten" if roles == ("convolution",) else ""


def differences(table, actual):
    """Compare a routing, `{name: (role, view)}`, with a table; names that only one of them has differ too."""
    unused = {entry.pattern for entry in table}
    wrong = []
    for name, (role, view) in actual.items():
        entry = next((entry for entry in table if fnmatchcase(name, entry.pattern)), None)
        if entry is None:
            wrong.append(f"{name}: the table does not mention it")
            continue
        unused.discard(entry.pattern)
        if role not in entry.roles:
            wrong.append(f"{name}: {role}, expected {' or '.join(entry.roles)}")
        elif view is not None and not _same_view(view.split(), entry.view.split()):
            wrong.append(f"{name}: {role} seen as {view or 'a matrix'!r}, expected {entry.view or 'a matrix'!r}")
    return wrong + [f"{pattern}: matches no parameter" for pattern in sorted(unused)]


def _same_view(actual, expected):
    """Whether two views are equal; a square matrix is the same as (in, out) and as (out, in).

    `thirds` is a split into three equal parts of any size, for models whose width changes from stage to stage.
    """
    if "thirds" in expected:
        actual = ["thirds" if re.fullmatch(r"split=(\d+),\1,\1", word) else word for word in actual]
    free = {"square", "transposed"} if "square" in actual else set()
    return set(actual) - free == set(expected) - free
