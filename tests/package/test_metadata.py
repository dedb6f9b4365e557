"""What the package says of itself in several places is the same everywhere."""

import re
import tomllib
from pathlib import Path

from muonsw import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CITATION = (ROOT / "CITATION.cff").read_text()


def cited(key):
    return re.search(rf'^{key}: "?([^"\n]+)"?$', CITATION, re.MULTILINE)[1]


def test_the_citation_is_of_this_version():
    assert cited("version") == __version__
    assert cited("license") == PROJECT["project"]["license"]
    assert cited("repository-code") == PROJECT["project"]["urls"]["Repository"]
    assert cited("url") == PROJECT["project"]["urls"]["Documentation"]


def test_a_package_index_is_sent_to_this_repository():
    """Relative addresses of the README become those of one repository, at the tag of the release."""
    owner = PROJECT["project"]["urls"]["Repository"].removeprefix("https://github.com/")
    rules = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    text = (ROOT / "README.md").read_text()
    for rule in rules:
        text = re.sub(rule["pattern"], rule["replacement"], text)
    addresses = re.findall(r"\]\(([^)]+)\)", text)
    ours = [address for address in addresses if f".com/{owner}/" in address]
    assert len(ours) > 20
    for address in addresses:
        assert address.startswith(("https://", "#")), address
    for address in ours:
        path = address.partition("/v$HFPR_VERSION/")[2].partition("#")[0]
        assert (ROOT / path).exists(), address
