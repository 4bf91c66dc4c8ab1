"""Two machines for all tests of the session. Ranks inherit what this process has imported, and read little data."""

import pytest

from tests.cluster.machines import NoMachinesError, two_machines
from tests.imports import import_all


@pytest.fixture(scope="session")
def both_machines():
    import_all()
    try:
        with two_machines() as both:
            yield both
    except NoMachinesError as error:
        pytest.skip(str(error))


@pytest.fixture
def machines(both_machines):
    """Connected, and with nothing of an earlier test on them."""
    for machine in both_machines:
        machine.set_link(up=True)
    yield both_machines
    for machine in both_machines:
        machine.kill_all()


@pytest.fixture(autouse=True)
def reads_little(short_library): ...
