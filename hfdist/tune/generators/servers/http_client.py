"""JSON over HTTP with one server: bounded in bytes and time, without proxies, redirects or compression."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

from hfdist.errors import named_line, printable
from hfdist.messages.message import Message, NotAMessageError, as_message, read_json
from hfdist.secrets import MASK

_MOST_BYTES = 2**22
"""The most bytes of an answer, if the caller says nothing else."""
_MOST_SAID = 300
"""Characters of what a server says that a message repeats."""


class NoAnswerError(Exception):
    """The server cannot be reached, ends the connection, or is too slow."""


class StatusError(Exception):
    """The server has answered with an error.

    Args:
        status: HTTP status, such as 404.
        said: the beginning of the answer, in one line.
    """

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"HTTP {status}: {said}" if said else f"HTTP {status}")
        self.status = status


class JsonClient:
    """Asks one server. A question has a connection of its own, so that threads may ask at once.

    Args:
        address: such as http://127.0.0.1:8000.
        key: what the server asks for in `Authorization`; None: nothing.
    """

    def __init__(self, address: str, key: str | None = None) -> None:
        self.address, self._key = address, key
        parts = urlsplit(address)
        assert parts.hostname is not None  # checked with the config
        self._host, self._port, self._is_encrypted = parts.hostname, parts.port, parts.scheme == "https"

    def get(self, path: str, *, seconds: float) -> Message:
        """Ask without content; see `post`."""
        return as_message(self._ask("GET", path, None, _MOST_BYTES, seconds))

    def post(
        self, path: str, content: Mapping[str, object], *, seconds: float, most_bytes: int = _MOST_BYTES
    ) -> object:
        """Send JSON, and read the answer; an empty one is an object without members.

        Args:
            path: begins with a slash.
            content: what is sent.
            seconds: the longest time for all of it.
            most_bytes: the most bytes of the answer.

        Raises:
            NoAnswerError: see there.
            StatusError: another status than 200; redirects are none of ours either.
            NotAMessageError: the answer is too long, or no JSON.
        """
        return self._ask("POST", path, json.dumps(content).encode(), most_bytes, seconds)

    def _ask(self, method: str, path: str, content: bytes | None, most_bytes: int, seconds: float) -> object:
        begin, headers = time.monotonic(), {"Accept-Encoding": "identity", "Connection": "close"}
        if content is not None:
            headers["Content-Type"] = "application/json"
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        connection = self._connection(seconds)
        try:
            connection.connect()
            with _ended_after(connection.sock, seconds):
                connection.request(method, path, content, headers)
                answer = connection.getresponse()
                found = _read(answer, most_bytes)
            if time.monotonic() - begin >= seconds:
                # An answer that does not say its length may have been cut off.
                raise TimeoutError
        except (OSError, HTTPException) as error:
            late = time.monotonic() - begin >= seconds
            raise NoAnswerError(f"no whole answer in {seconds:g} s" if late else named_line(error)) from error
        finally:
            connection.close()
        if answer.status != 200:
            raise StatusError(answer.status, self._printable(found))
        return read_json(found, most_bytes) if found.strip() else {}

    def _connection(self, seconds: float) -> HTTPConnection:
        if self._is_encrypted:
            return HTTPSConnection(self._host, self._port, timeout=seconds, context=ssl.create_default_context())
        return HTTPConnection(self._host, self._port, timeout=seconds)

    def _printable(self, said: bytes) -> str:
        # Cut after the key is masked: a part of it must not stay.
        text = said[: 2**16].decode(errors="replace")
        if self._key:
            text = text.replace(self._key, MASK)
        return printable(" ".join(text.split()), _MOST_SAID)


@contextmanager
def _ended_after(connection: socket.socket, seconds: float) -> Iterator[None]:
    """End a connection after a time, even if bytes come one by one: a socket's timeout counts from the last byte."""

    def end() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _read(answer: HTTPResponse, most_bytes: int) -> bytes:
    found = answer.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise NotAMessageError(f"it is longer than {most_bytes} bytes")
    if answer.length:
        raise ConnectionResetError("the answer was cut off")
    return found
