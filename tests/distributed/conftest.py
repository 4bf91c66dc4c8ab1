"""Ranks inherit what this process has imported, and read a small part of the standard library: both save seconds."""

import pytest

from tests.imports import import_all


@pytest.fixture(scope="session", autouse=True)
def imported():
    import_all()


@pytest.fixture(scope="module", autouse=True)
def reads_little(short_library): ...
