"""The pages: keys that are up to date, links that lead somewhere, `make` commands that exist, and a command first."""

import re

import pytest

from tests.keys import page
from tests.unit.config.shipped import CONF

ROOT = CONF.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "benchmarks" / "RESULTS.md", *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def name(path):
    return str(path.relative_to(ROOT))


def anchors(path):
    """The names that GitHub and mkdocs give to the headings of a page."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE):
        yield re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def test_the_page_of_keys_is_up_to_date():
    assert (DOCS / "keys.md").read_text(encoding="utf-8") == page(), "make docs writes it"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for file, anchor in LINK.findall(text):
        target = (path.parent / file) if file else path
        assert target.exists(), file
        assert not anchor or anchor in anchors(target), f"{file}#{anchor}"


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=name)
def test_a_page_begins_with_a_command(path):
    first = path.read_text(encoding="utf-8").partition("\n")[2].lstrip()
    assert re.match(r"```\n(hfdist|accelerate launch|make|pip install|python -m benchmarks)\b", first)


def test_each_page_is_found_from_readme_or_an_index():
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    for path in sorted(DOCS.rglob("*.md")):
        assert any(f"{path.name})" in text or f"{path.name}#" in text for text in texts), path


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_the_make_commands_exist(path):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    assert {*re.findall(r"(?:`|^)make ([a-z]+)", text, flags=re.MULTILINE)} <= targets
