"""The servers, for all tests of the data room."""

from tests.unit.data.servers import s3, s3_server, web

__all__ = ["s3", "s3_server", "web"]
