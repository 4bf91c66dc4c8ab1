"""A server of the page for browsers of this machine; parts that change follow as server-sent events.

    files -- refresh --> LivePage        one thread reads the files and draws the parts, each with a version
                            | parts that are newer than the browser's version
                         _Handler        a thread for each browser
                            | the page at first, then `events`
                         browser         comes back with the version of what it has

The address has a secret part, as other users of the machine reach its loopback interface, too. A request under another
host's name is refused: that name may lead to this machine, and a page of that host might read this one.
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
from typing import NamedTuple

from hfdist.errors import ConfigError, named_line
from hfdist.tools.report.page import page, parts
from hfdist.tools.report.reading.run_files import RunFiles

Request = socket.socket | tuple[bytes, socket.socket]
"""A browser's connection, as `socketserver` passes it on."""

_HOST = "127.0.0.1"
_NAMES = (_HOST, "localhost")
"""Names by which a browser may call this machine; through a tunnel, the port is another one."""
_EVERY_SECONDS = 1.0
"""Least seconds between two readings of the files."""
_LEAST_REST = 10.0
"""Least pause between two drawings, as a multiple of a drawing's time: a long run must not keep a core busy."""
_MOST_BROWSERS = 64
"""Most connections at a time. A silent one ends after `_Handler.timeout`."""
_PING_SECONDS = 15.0
"""Most seconds in which nothing is sent: a browser that has gone is noticed only when something is sent to it."""


class _VersionedPart(NamedTuple):
    """The HTML of a part, with the version of the page in which it became so."""

    version: int
    html: str


class LivePage:
    """The newest HTML of each part of the page, with a version that grows when a part changes.

    Args:
        runs: the runs that the page is about.
        sweeps: folders of the sweeps whose trials these runs are.
    """

    def __init__(self, runs: Sequence[RunFiles], sweeps: Sequence[Path] = ()) -> None:
        self.runs, self._sweeps = runs, sweeps
        # Versions of another start of the server do not count: a browser that comes back takes all parts.
        self._boot = secrets.token_hex(4)
        # It guards the fields below, and tells the browsers' threads of changes.
        self._changed = threading.Condition()
        self._newest_version = 0
        self._parts: dict[str, _VersionedPart] = {}
        self.has_ended = False
        self.refresh()

    def refresh(self) -> None:
        """Read new lines of all runs, and draw the parts."""
        for run in self.runs:
            run.read()
        html_of = parts(self.runs, self._sweeps)
        with self._changed:
            for name, html in html_of.items():
                if name not in self._parts or self._parts[name].html != html:
                    self._newest_version += 1
                    self._parts[name] = _VersionedPart(self._newest_version, html)
            self._changed.notify_all()

    def follow(self) -> None:
        """Refresh again and again until `end` is called. A refresh that fails is tried again."""
        rest, last_warning = _EVERY_SECONDS, ""
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self.has_ended, rest):
                    return
            begin = time.monotonic()
            try:
                self.refresh()
            except Exception as error:
                # Whatever one file has done to the drawing, the next reading may be right; a cause is said once.
                warning = f"warning: the page stays as it was: {named_line(error)}\n"
                if warning != last_warning:
                    sys.stderr.write(warning)
                last_warning = warning
            rest = max(_EVERY_SECONDS, _LEAST_REST * (time.monotonic() - begin))

    def end(self) -> None:
        """Let the thread that refreshes and the threads of all browsers come to their end."""
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    def html(self, events: str) -> str:
        """Give the whole page as it is now. It asks for changes at the address `events`, with its place after `?`."""
        with self._changed:
            html_of = {name: part.html for name, part in self._parts.items()}
            place = f"{self._boot}-{self._newest_version}"
        return page(self.runs, html_of, events=f"{events}?{place}")

    def wait_for_news(self, place: str) -> tuple[str, dict[str, str]]:
        """Wait for changes after a browser's place; give the new place and the HTML of the changed parts by name.

        No part has changed if too much time has passed, or if the page has ended.

        Args:
            place: BOOT-VERSION of what the browser has; any other text: it takes all parts.
        """
        boot, _, version = place.partition("-")
        known = int(version) if boot == self._boot and version.isdecimal() else -1
        with self._changed:
            self._changed.wait_for(lambda: self.has_ended or self._newest_version > known, _PING_SECONDS)
            news = {name: part.html for name, part in self._parts.items() if part.version > known}
            return f"{self._boot}-{self._newest_version}", news


class Server(ThreadingHTTPServer):
    """A server of one page on the loopback interface, with a thread for each browser.

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
        # A connection takes one, and its thread gives it back.
        self._free_places = threading.BoundedSemaphore(_MOST_BROWSERS)
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
        """Give a browser a thread; close its connection if there are too many."""
        if not self._free_places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:
            # No thread can be started now: none will give the place back.
            self._free_places.release()
            raise

    def process_request_thread(self, request: Request, client_address: object) -> None:
        """Answer one browser, in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Write the error of a request as one line; the error of a browser that has gone is none."""
        error = sys.exception()
        # A browser that has gone is an OSError: its connection is closed.
        if error is not None and not isinstance(error, OSError):
            sys.stderr.write(f"warning: the page cannot be sent: {named_line(error)}\n")


class _Handler(BaseHTTPRequestHandler):
    """The answers to one browser: `/SECRET/` is the page, and `/SECRET/events` what changes in it."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "hfdist"
    sys_version = ""
    timeout = 20

    def do_GET(self) -> None:
        """Answer with the page, or with its events as they come."""
        path, _, query = self.path.partition("?")
        folder, slash, name = path.removeprefix("/").partition("/")
        host, _, _ = self.headers.get("Host", "").partition(":")
        # In the same time for each guess, so that the secret cannot be found letter by letter.
        knows_secret = hmac.compare_digest(folder.encode(), self.server.secret.encode())
        if host.lower() not in _NAMES:
            self._refuse(HTTPStatus.FORBIDDEN, "this page is for this machine: 127.0.0.1 or localhost")
        elif not knows_secret or name not in ("", "events"):
            self._refuse(HTTPStatus.NOT_FOUND, "no such page: the command has written its address")
        elif not slash:
            # The page asks for `events` relative to its own address.
            self._answer(HTTPStatus.FOUND, "text/plain; charset=utf-8", b"", Location=f"/{folder}/")
        elif name == "":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.live.html("events").encode())
        else:
            # A browser that comes back says the place that it has reached; at first, the page's address has it.
            self._stream(self.headers.get("Last-Event-ID") or query)

    def log_message(self, format: str, *args: object) -> None:
        """Write no line for a request, as the base class would."""

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
        """Send what changes after a browser's place, until the browser has gone or the page has ended."""
        # Such an answer has no length: only the end of the connection ends it.
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
    """Serve the page about some runs until Ctrl-C, and write its address to stdout.

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
