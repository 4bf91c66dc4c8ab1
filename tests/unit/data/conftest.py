"""The servers, and folders for data and caches, for all tests of the data room."""

import pytest

from tests.unit.data.servers import s3, s3_server, web

__all__ = ["s3", "s3_server", "web"]


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"
