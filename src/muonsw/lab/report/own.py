"""Pages and figures carry a mark of their maker, and take the place of no file without it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from muonsw.lab.errors import UsageError
from muonsw.lab.files import write_atomically

MAKER = "muonsw"
PAGE_MARK = f'<meta name="generator" content="{MAKER}">'
# Where the mark is, by kind of file: matplotlib writes the maker into what `METADATA` names.
MARKS = {
    ".html": PAGE_MARK,
    ".htm": PAGE_MARK,
    ".png": f"tEXtSoftware\0{MAKER}",
    ".svg": f"<dc:title>{MAKER}</dc:title>",
    ".json": '{"version": 1, "scope": ',  # the beginning of a diagnosis
}
# Without a date two equal runs give equal files.
METADATA: dict[str, dict[str, str | None]] = {".png": {"Software": MAKER}, ".svg": {"Date": None, "Creator": MAKER}}
HEAD_BYTES = 4096


def write_own(path: Path, content: str | bytes) -> Path:
    """Write a page, a figure or a diagnosis, unless a file that is not ours is there."""
    require_own([path])
    return write_atomically(path, content)


def require_own(paths: Iterable[Path]) -> None:
    """Refuse to replace a file that does not carry the mark."""
    for path in paths:
        if os.path.lexists(path) and not is_own(path):
            raise UsageError(f"{path} was not written by {MAKER}: delete it, or choose another name")


def require_own_folder(folder: Path) -> None:
    """Refuse to fill a folder with figures that holds something else, such as a run."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir():
        raise UsageError(f"figures go into a folder {folder}, and something else has that name: choose another")
    foreign = [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and not is_own(path)]
    if foreign:
        holds = f"which holds {foreign[0].name} already and was not made by {MAKER}"
        raise UsageError(f"figures would go into {folder}, {holds}: choose another name, or --no-images")


def is_own(path: Path) -> bool:
    """Whether a file carries the mark."""
    mark = MARKS.get(path.suffix.lower())
    if mark is None or not path.is_file():
        return False
    with path.open("rb") as file:
        return mark.encode() in file.read(HEAD_BYTES)
