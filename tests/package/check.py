"""Build the package, look into what was built, and use it where nothing else is installed; `make test-package`.

Runs with the tools in `.venv-package`. Prints one line for each thing that holds; the first that does not is an error.
"""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Everything else (tests, data, papers, figures) is for those who have the repository.
IN_SDIST = ("src/", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "pyproject.toml", ".gitignore")
PINNED = ("-c", ROOT / "constraints.txt")


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """What a command prints, or its whole output and an error."""
    outside = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**outside, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """The wheel, built from the sdist as an installer would, and the sdist."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    return wheel, sdist


def look_into(wheel: Path, sdist: Path) -> None:
    """Only what belongs there, the marker of typed packages, and the README as its description."""
    with tarfile.open(sdist) as archive:
        inside = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    foreign = [name for name in inside if not name.startswith(IN_SDIST)]
    assert not foreign, f"in the sdist: {foreign[:10]}"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        described = email.message_from_bytes(archive.read(metadata))
    assert "muonsw/py.typed" in names
    foreign = [name for name in names if not name.startswith(("muonsw/", metadata.partition("/")[0]))]
    assert not foreign, f"in the wheel: {foreign[:10]}"
    assert "# muonsw" in str(described.get_payload()), "the description is not the README"
    print(f"{len(names)} files in the wheel, {len(inside)} in the sdist")


def use(wheel: Path, folder: Path) -> None:
    """In an environment with torch alone: a user's program runs, and its types hold."""
    run(sys.executable, "-m", "venv", folder / "clean")
    python = folder / "clean" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", *PINNED, "torch", wheel)
    program = folder / "user_program.py"
    program.write_text((ROOT / "tests" / "package" / "user_program.py").read_text(encoding="utf-8"), encoding="utf-8")
    print(run(python, "-W", "ignore:Failed to initialize NumPy", program, cwd=folder).strip())  # torch can do without
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src" / "muonsw" / "__init__.py").read_text(encoding="utf-8"))
    assert version is not None
    said = run(folder / "clean" / "bin" / "muonsw", "--version", cwd=folder).splitlines()[-1]  # torch may warn before
    assert said == f"muonsw {version[1]}", said
    print(f"`muonsw --version` says {said}")
    run(python, "-m", "pip", "install", "-q", *PINNED, "mypy")
    print("types: " + run(python, "-m", "mypy", "--strict", program.name, cwd=folder).strip())


def main() -> None:
    """All of it, in a folder that is removed."""
    run(Path(sys.executable).with_name("cffconvert"), "--validate", "-i", ROOT / "CITATION.cff")
    print("CITATION.cff is valid")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        wheel, sdist = build(folder / "dist")
        look_into(wheel, sdist)
        use(wheel, folder)


if __name__ == "__main__":
    main()
