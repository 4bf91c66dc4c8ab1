"""Tests of the zoo take `model_type`: a sample of the types, or with `-m zoo` every one."""

import pytest

from tests.zoo.models import SAMPLE, TYPES


def chosen(config):
    return TYPES if config.getoption("markexpr") == "zoo" else SAMPLE


def pytest_generate_tests(metafunc):
    if "model_type" in metafunc.fixturenames:
        metafunc.parametrize("model_type", chosen(metafunc.config))


@pytest.fixture(scope="session")
def types(request):
    """All that `model_type` may be, for fixtures that try them in one fork."""
    return chosen(request.config)
