"""The server: threads, a log of requests, and the settings that point huggingface_hub at it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

from tests.hub_server.downloads import Downloads
from tests.hub_server.faults import Faults
from tests.hub_server.handler import Handler
from tests.hub_server.repositories import Store
from tests.hub_server.uploads import Uploads


class RequestHandler(Uploads, Downloads, Handler):
    """All routes."""


class HubServer(ThreadingHTTPServer):
    """Repositories in `store`; what is to go wrong in `faults`; what was asked in `requests`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RequestHandler)
        self.store, self.faults = Store(), Faults()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.part_bytes: int | None = None
        """Uploads of more bytes than these are asked for in parts."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def storage_url(self) -> str:
        """Another origin for large files, to which no token may be sent."""
        return f"http://localhost:{self.server_address[1]}"

    def asked(self, beginning: str) -> list[str]:
        """Requests that begin so, as `GET /path`."""
        return [line for line, _ in self.requests if line.startswith(beginning)]

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may leave at any time."""


@contextlib.contextmanager
def running() -> Iterator[HubServer]:
    with HubServer() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()
