"""What the package says of itself in several places is the same everywhere."""

import re
import tomllib
from pathlib import Path

from muonsw import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CITATION = (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def cited(key):
    return re.search(rf'^{key}: "?([^"\n]+)"?$', CITATION, re.MULTILINE)[1]


def test_the_citation_is_of_this_version():
    assert cited("version") == __version__
    assert cited("license") == PROJECT["project"]["license"]


def test_the_project_has_no_address_but_the_one_place_for_it():
    """Until there is one: pyproject's table of addresses, which everything else would read."""
    files = [ROOT / name for name in ("pyproject.toml", "CITATION.cff", "mkdocs.yml", "README.md")]
    own = [
        path.name for path in files if re.search(r"(github\.com|github\.io)/muonsw", path.read_text(encoding="utf-8"))
    ]
    assert own == ([] if "urls" not in PROJECT["project"] else ["pyproject.toml"])
