"""Older names of modules that users import."""

import re
from importlib import import_module

import pytest

from hfdist.moved import MOVED
from tests.unit.config.shipped import CONF


@pytest.mark.parametrize(
    ("old", "name", "new"),
    [
        ("config.command", "recipe", "config.cli.command"),
        ("config.compose", "compose_config", "config.composition.compose"),
        ("trainer.arguments", "build_arguments", "trainer.run.training_arguments"),
        ("trainer.callbacks", "ProgressBar", "trainer.reporting.callbacks"),
        ("trainer.metrics", "Generation", "trainer.evaluation.generation"),
    ],
)
def test_an_older_name_works_and_warns(old, name, new):
    with pytest.warns(DeprecationWarning, match=f"hfdist.{old} is now hfdist.{new}"):
        found = getattr(import_module(f"hfdist.{old}"), name)
    assert found is getattr(import_module(f"hfdist.{new}"), name)


def test_the_changelog_lists_them():
    text = (CONF.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    assert dict(re.findall(r"^\| `(hfdist\.[\w.]+)` \| `(hfdist\.[\w.]+)` \|$", text, flags=re.MULTILINE)) == MOVED
