"""The server, and tiny models to put into it."""

import pytest

from hfdist.models import hub_client
from tests.hub_server import hub, write_model  # noqa: F401


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(hub_client, "FIRST_WAIT_SECONDS", 0.01)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def sharded_folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("sharded"), max_shard_size="40KB")
