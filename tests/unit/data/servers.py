"""Real servers on this machine that can be told to fail: files over HTTP, and S3 behind a proxy."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.hub_server import Cut, Slow


class FaultyServer(ThreadingHTTPServer):
    """Answers in threads. `faults[path]` is a list of `Cut`, `Slow` or a status; each request takes the first."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)
        self.files: dict[str, bytes] = {}
        self.faults: dict[str, list] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.versions: Counter[str] = Counter()
        self.ranges = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address):
        """Clients may leave, or be killed, at any time."""

    def asked(self, method: str) -> int:
        return sum(request[0] == method for request in self.requests)

    def replace(self, path: str, content: bytes) -> None:
        self.files[path] = content
        self.versions[path] += 1


class FaultyHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyServer

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, path, self.headers.get("Range")))
        faults, cut = self.server.faults.get(path, []), None
        if faults and not (isinstance(faults[0], Cut) and self.command == "HEAD"):
            match faults.pop(0):
                case Cut(after_bytes):
                    cut = after_bytes
                case Slow(seconds):
                    time.sleep(seconds)
                case status:
                    return self.give(status, {}, b"")
        return self.give(*self.answer(path), cut=cut)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def give(self, status, headers, body, *, cut=None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            # Readers may have seen enough, or may have been killed.
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.close_connection = True

    def log_message(self, *_):
        """Nothing."""

    def answer(self, path):
        raise NotImplementedError


class FilesHandler(FaultyHandler):
    """Gives `files`, whole or in ranges, and an index page of every folder."""

    def answer(self, path):
        content = self.server.files.get(path)
        if content is None:
            return self.index(path.rstrip("/") + "/")
        headers = {"ETag": f'"{path}-{self.server.versions[path]}"'}
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not asked or not self.server.ranges:
            return 200, headers, content
        start, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
        if start >= len(content):
            return 416, headers, b""
        headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
        return 206, headers, content[start : last + 1]

    def index(self, folder):
        below = [path.removeprefix(folder) for path in self.server.files if path.startswith(folder)]
        if not below:
            return 404, {}, b""
        links = sorted({part + slash for part, slash, _ in (path.partition("/") for path in below)})
        page = "".join(f'<a href="{link}">{link}</a>\n' for link in ["../", *links])
        return 200, {"Content-Type": "text/html"}, page.encode()


class ProxyHandler(FaultyHandler):
    """Passes every request on to the S3 server."""

    target: tuple[str, int]

    def answer(self, path):
        connection = http.client.HTTPConnection(*self.target, timeout=30)
        connection.request(self.command, self.path, self.body, dict(self.headers))
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        own = {"content-length", "date", "server", "connection", "transfer-encoding"}
        headers = {name: value for name, value in answer.getheaders() if name.lower() not in own}
        if self.command == "HEAD":
            headers["Content-Length"] = answer.getheader("Content-Length", "0")
        return answer.status, headers, body


@contextlib.contextmanager
def running(handler) -> Iterator[FaultyServer]:
    server = FaultyServer(handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def web():
    with running(FilesHandler) as server:
        yield server


@pytest.fixture(scope="session")
def s3_server():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The proxy in front of an S3 server with an empty bucket `corpus`; `put(name, content)` fills it."""
    import boto3

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    handler = type("Proxy", (ProxyHandler,), {"target": s3_server})
    with running(handler) as server:
        client = boto3.client("s3", endpoint_url="http://{}:{}".format(*s3_server))
        client.create_bucket(Bucket="corpus")
        server.put = lambda name, content: client.put_object(Bucket="corpus", Key=name, Body=content)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        yield server
        for entry in client.list_objects_v2(Bucket="corpus").get("Contents", []):
            client.delete_object(Bucket="corpus", Key=entry["Key"])
        client.delete_bucket(Bucket="corpus")
