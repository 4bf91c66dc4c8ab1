"""The servers, and folders for data and caches, for all tests of the data room."""

import pytest

from tests.unit.data.servers import s3, s3_server, web

__all__ = ["s3", "s3_server", "web"]


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data", tmp_path / "cache"
