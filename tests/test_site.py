"""The pages of the site: navigation, API, installation, assets."""

import re
from pathlib import Path

import muonsw

ROOT = Path(__file__).parent.parent
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
API = {
    path.name: re.findall(r"^::: (\S+)", path.read_text(encoding="utf-8"), re.M)
    for path in (ROOT / "docs/api").glob("*.md")
}


def test_every_page_is_in_the_navigation_once():
    named = re.findall(r"(\S+\.md)$", SITE, re.M)
    assert sorted(named) == sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))


def test_every_public_name_is_on_one_page_of_the_api():
    documented = [name for names in API.values() for name in names]
    assert len(set(documented)) == len(documented)
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs/api").glob("*.md"))
    public = [name for name in muonsw.__all__ if name != "__version__"]
    missing = [name for name in public if not re.search(rf"\b{name}\b", text)]
    assert missing == []


def test_there_is_one_way_to_install():
    """From the clone: no package index has this package."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    assert not [line for line in lines if re.search(r"pip install '?muonsw", line)]


def test_the_pages_load_nothing_from_another_server():
    """The offline search plugin would load a script from a server, unless it finds this file."""
    assert re.search(r"polyfills: \[assets/iframe-worker\.js\]", SITE)
    assets = [*(ROOT / "docs/assets").glob("*.js"), *(ROOT / "docs/assets").glob("*.css")]
    assert len(assets) == 3
    assert not any("http" in path.read_text(encoding="utf-8") for path in assets)
