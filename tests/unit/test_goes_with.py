"""docs/what-goes-with-what.md has all values of conf/, and says what the checks say."""

import re
from itertools import combinations

import pytest

from hfdist.config.composition.compose import compose_config
from hfdist.errors import ConfigError
from proofs.pages.goes_with import HEAD, axes, refusal
from tests.unit.config.shipped import CONF

PAGE = (CONF.parent / "docs" / "what-goes-with-what.md").read_text(encoding="utf-8")
REASONS = dict(re.findall(r"^(\d+)\. (.*)$", PAGE, flags=re.MULTILINE))


def table(one, other):
    """The cells by their row and column; empty: the page says that all go together."""
    _, heading, rest = PAGE.partition(f"\n## {one} and {other}\n")
    if not heading:
        assert f"\n* {one} and {other}\n" in PAGE
        return {}
    rows = [re.findall(r"[^|]+", line) for line in rest.partition("\n## ")[0].splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip(" `") for cell in row] for row in rows]
    return {row[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def test_the_page_has_all_values():
    assert PAGE.startswith(HEAD)
    for one, other in combinations(axes(), 2):
        cells = table(one, other)
        if cells:
            assert list(cells) == axes()[one], "make docs writes it"
            assert all(list(row) == axes()[other] for row in cells.values()), "make docs writes it"


@pytest.mark.parametrize("other", ["train.precision", "train.compile", "model.attention"])
def test_a_row_says_what_the_checks_say(other):
    cells = table("strategy", other).get("tensor", {})
    for value in axes()[other]:
        reason = refusal((("strategy", "tensor"), (other, value)))
        assert reason == REASONS.get(cells.get(value, "yes")), value


def test_composing_both_says_the_same():
    with pytest.raises(ConfigError) as refused:
        compose_config(["model=tiny", "strategy=tensor", "train.precision=fp8"])
    assert refusal((("strategy", "tensor"), ("train.precision", "fp8"))).lower().startswith(refused.value.what.lower())


def test_what_only_the_model_shows_is_there():
    pair = (("strategy", "tensor"), ("adapter", "dora"))
    assert refusal(pair) is None
    assert refusal(pair, tries_model=True) == REASONS[table("strategy", "adapter")["tensor"]["dora"]]
