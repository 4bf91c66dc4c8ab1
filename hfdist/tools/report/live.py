"""The page over HTTP, for this machine alone: parts that have changed follow as server-sent events.

One thread reads the files and draws; each browser has a thread that sends it the parts that are newer than its own. The
address has a part that cannot be guessed, as other users of the machine reach its loopback, too. A request by the name
of another host that leads here is refused: a page of that host might read this one.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from hfdist.errors import ConfigError, named_line
from hfdist.tools.report.page import page, parts
from hfdist.tools.report.reading.run_files import RunFiles

Request = socket.socket | tuple[bytes, socket.socket]
"""A browser's connection, as servers of the standard library have it."""

_HOST = "127.0.0.1"
_NAMES = (_HOST, "localhost")
"""Names by which a browser may call this machine; through a tunnel, the port is another one."""
_EVERY_SECONDS = 1.0
_LEAST_REST = 10.0
"""The pause between two drawings, as a multiple of a drawing's time: a long run must not keep a core busy."""
_MOST_BROWSERS = 64
"""Most connections at a time. A silent one ends after `_Handler.timeout`."""
_PING_SECONDS = 15.0
"""A browser that has gone is noticed when something is sent to it."""


class LivePage:
    """The newest HTML of each part, with a version that grows when one changes.

    Args:
        runs: the runs that the page is about.
        sweeps: folders of the sweeps whose trials these runs are.
    """

    def __init__(self, runs: Sequence[RunFiles], sweeps: Sequence[Path] = ()) -> None:
        self.runs, self._sweeps = runs, sweeps
        # Versions of another start of the server do not count: a browser that comes back takes all parts.
        self._boot = secrets.token_hex(4)
        self._changed = threading.Condition()
        self._num_changes = 0
        self._parts: dict[str, tuple[int, str]] = {}
        self.has_ended = False
        self.refresh()

    def refresh(self) -> None:
        """Read new lines of all runs, and draw."""
        for run in self.runs:
            run.read()
        html_of = parts(self.runs, self._sweeps)
        with self._changed:
            for name, html in html_of.items():
                if self._parts.get(name, (0, None))[1] != html:
                    self._num_changes += 1
                    self._parts[name] = (self._num_changes, html)
            self._changed.notify_all()

    def follow(self) -> None:
        """Refresh until `end`. A refresh that fails is tried again."""
        rest, said = _EVERY_SECONDS, ""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self.has_ended, rest):
                    return
            begin = time.monotonic()
            try:
                self.refresh()
            except Exception as error:
                words = f"warning: the page stays as it was: {named_line(error)}\n"
                if words != said:
                    sys.stderr.write(words)
                said = words
            rest = max(_EVERY_SECONDS, _LEAST_REST * (time.monotonic() - begin))

    def end(self) -> None:
        """Let all threads come to their end."""
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    def html(self, events: str) -> str:
        """Give the whole page as it is now. It asks for changes at the address `events`, with its version after `?`."""
        with self._changed:
            found, version = {name: html for name, (_, html) in self._parts.items()}, self._num_changes
        return page(self.runs, found, events=f"{events}?{self._boot}-{version}")

    def wait_for_news(self, place: str) -> tuple[str, dict[str, str]]:
        """Give the new place and the parts that have changed since `place`; none of them after some time or the end."""
        boot, _, version = place.partition("-")
        known = int(version) if boot == self._boot and version.isdecimal() else -1
        with self._changed:
            self._changed.wait_for(lambda: self.has_ended or self._num_changes > known, _PING_SECONDS)
            news = {name: html for name, (own, html) in self._parts.items() if own > known}
            return f"{self._boot}-{self._num_changes}", news


class Server(ThreadingHTTPServer):
    """Serves a page on the loopback interface.

    Args:
        live: the page.
        port: port to listen at; 0: any free port.

    Raises:
        ConfigError: the port is taken.
    """

    daemon_threads = True

    def __init__(self, live: LivePage, port: int) -> None:
        self.live = live
        self.secret = secrets.token_urlsafe(12)
        self._places = threading.BoundedSemaphore(_MOST_BROWSERS)
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            what, hint = f"the page cannot be served: {error.strerror}", "another port, or none: any that is free"
            raise ConfigError(what, where="port (command line)", found=port, hint=hint) from error

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://{_HOST}:{self.server_address[1]}/{self.secret}/"

    def process_request(self, request: Request, client_address: object) -> None:
        """Give each browser a thread, as long as there are not too many."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread can be started now.
            self._places.release()
            raise

    def process_request_thread(self, request: Request, client_address: object) -> None:
        """Answer one browser."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Write other errors than that of a browser that has gone, in one line."""
        error = sys.exception()
        if error is not None and not isinstance(error, OSError):
            sys.stderr.write(f"warning: the page cannot be sent: {named_line(error)}\n")


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "hfdist"
    sys_version = ""
    timeout = 20

    def do_GET(self) -> None:
        """Give the page, or its events as they come."""
        path, _, query = self.path.partition("?")
        folder, slash, name = path.removeprefix("/").partition("/")
        if self.headers.get("Host", "").partition(":")[0].lower() not in _NAMES:
            self._refuse(HTTPStatus.FORBIDDEN, "this page is for this machine: 127.0.0.1 or localhost")
        elif not hmac.compare_digest(folder.encode(), self.server.secret.encode()) or name not in ("", "events"):
            self._refuse(HTTPStatus.NOT_FOUND, "no such page: the command has written its address")
        elif not slash:
            # The page asks for `events` relative to its own address.
            self._answer(HTTPStatus.FOUND, "text/plain; charset=utf-8", b"", Location=f"/{folder}/")
        elif name == "":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.live.html("events").encode())
        else:
            self._stream(self.headers.get("Last-Event-ID") or query)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests."""

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def _answer(self, status: HTTPStatus, kind: str, content: bytes, **headers: str) -> None:
        self.send_response(status)
        self._send_headers(kind)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _send_headers(self, kind: str) -> None:
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")

    def _stream(self, place: str) -> None:
        self.close_connection = True
        self.send_response(HTTPStatus.OK)
        self._send_headers("text/event-stream")
        self.end_headers()
        live = self.server.live
        while not live.has_ended:
            place, news = live.wait_for_news(place)
            lines = [f"data: {json.dumps({'id': name, 'html': html})}\n\n" for name, html in news.items()]
            if lines:
                # A browser that was cut off before the last of them hears all of them again.
                lines[-1] = f"id: {place}\n{lines[-1]}"
            # A comment tells nothing; that it cannot be sent tells that the browser has gone.
            self.wfile.write("".join(lines or [":\n\n"]).encode())
            self.wfile.flush()


def serve(runs: Sequence[RunFiles], port: int, sweeps: Sequence[Path] = ()) -> None:
    """Serve until Ctrl-C.

    Args:
        runs: the runs that the page is about.
        port: port to listen at; 0: any free port.
        sweeps: folders of the sweeps whose trials these runs are.

    Raises:
        ConfigError: the port is taken.
    """
    live = LivePage(runs, sweeps)
    server = Server(live, port)
    try:
        threading.Thread(target=live.follow, daemon=True).start()
        tunnel = f"ssh -L PORT:{_HOST}:{server.server_port} HOST"
        sys.stdout.write(f"{server.url}\nCtrl-C ends it. From another machine: {tunnel}\n")
        sys.stdout.flush()
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        sys.stdout.write("\n")
    finally:
        live.end()
        server.server_close()
