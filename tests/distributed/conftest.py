"""Ranks inherit what this process has imported, and read a small part of the standard library: both save seconds."""

import pytest

from tests.huge_pages import use_huge_pages
from tests.imports import import_all
from tests.quick_probes import quick_probes


@pytest.fixture(scope="session", autouse=True)
def imported():
    import_all()


@pytest.fixture(scope="module", autouse=True)
def reads_little(short_library): ...


@pytest.fixture(scope="session")
def asked(tmp_path_factory):
    return tmp_path_factory.mktemp("asked")


@pytest.fixture(scope="module", autouse=True)
def asks_once(request, asked):
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "ASKS_ANEW", False):
            quick_probes(patch, asked)
        yield


@pytest.fixture(scope="module", autouse=True)
def forks_quickly(imported):
    # Again, since pages that are written to while there are forks become small ones.
    use_huge_pages()


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """A model that answers `sums`, some of them rightly."""
    # Here: TRL takes seconds.
    from tests.distributed import policy_runs

    return policy_runs.write_model(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session")
def sums(tmp_path_factory):
    """Rows for it."""
    from tests.distributed import policy_runs

    return policy_runs.write_sums(tmp_path_factory.mktemp("rows") / "sums.jsonl")
