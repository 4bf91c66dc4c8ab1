"""The pages: keys that are up to date, links that lead somewhere, `make` commands that exist, and a command first."""

import re

import pytest
import yaml

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


# Decisions are for those who change hfdist.
@pytest.mark.parametrize(
    "path", [path for path in sorted(DOCS.rglob("*.md")) if path.parent.name != "decisions"], ids=name
)
def test_a_page_begins_with_a_command(path):
    first = path.read_text(encoding="utf-8").partition("\n")[2].lstrip()
    assert re.match(r"```\n(hfdist|accelerate launch|make|pip install|python -m benchmarks)\b", first)


def test_each_page_is_found_from_another():
    found = {
        (path.parent / file).resolve()
        for path in PAGES
        for file, _ in LINK.findall(path.read_text(encoding="utf-8"))
        if file
    }
    assert {*DOCS.rglob("*.md")} <= found


def test_each_page_is_in_the_menu_of_the_site():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    items = [
        item for entry in nav for value in entry.values() for item in (value if isinstance(value, list) else [entry])
    ]
    assert sorted(ROOT / path for item in items for path in item.values()) == sorted(PAGES)


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_the_make_commands_exist(path):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    assert {*re.findall(r"(?:`|^)make ([a-z]+)", text, flags=re.MULTILINE)} <= targets
