"""Tests of the zoo take `model_type`: a sample of the types, or with `-m zoo` every one."""

from tests.zoo.models import SAMPLE, TYPES


def pytest_generate_tests(metafunc):
    if "model_type" in metafunc.fixturenames:
        metafunc.parametrize("model_type", TYPES if metafunc.config.getoption("markexpr") == "zoo" else SAMPLE)
