"""The citation names the version and the license of the package."""

import re
import tomllib
from pathlib import Path

from muonsw import __version__

ROOT = Path(__file__).parents[2]


def test_the_citation_is_of_this_version():
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for key, value in (("version", __version__), ("license", project["license"])):
        assert re.search(rf'^{key}: "?{re.escape(value)}"?$', citation, re.MULTILINE)
