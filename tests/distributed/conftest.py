"""Ranks inherit what this process has imported."""

import pytest

from tests.imports import import_all


@pytest.fixture(scope="session", autouse=True)
def imported():
    import_all()
