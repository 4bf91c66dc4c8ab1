"""Forked commands read a small part of the standard library, as forked ranks do: seconds of most files here."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def reads_little(request):
    # There, what forked commands and fresh processes have trained is compared.
    if not request.module.__name__.endswith("test_launch"):
        request.getfixturevalue("short_library")
