"""Tests of the zoo take `model_type`: a sample of the types, or with `-m zoo` every one."""

from tests.zoo.models import SAMPLE, TYPES


def is_of_all(config):
    """Whether every type was asked for."""
    return config.getoption("markexpr") == "zoo"


def pytest_generate_tests(metafunc):
    if "model_type" in metafunc.fixturenames:
        metafunc.parametrize("model_type", TYPES if is_of_all(metafunc.config) else SAMPLE)
