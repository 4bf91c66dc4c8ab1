"""What all routes share: finding the route, faults, users and the Hub's ways to say no."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from tests.hub_server.faults import BadBytes, Cut, Slow, Status
from tests.hub_server.repositories import Repository, Store, User


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def route(method: str, pattern: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a method of the handler as the answer to requests of this shape."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        function.route = (method, re.compile(pattern))
        return function

    return mark


class Handler(BaseHTTPRequestHandler):
    """Answers by the methods that are marked with `route`."""

    protocol_version = "HTTP/1.1"

    @property
    def store(self) -> Store:
        return self.server.store

    def answer(self) -> None:
        path = unquote(self.path.partition("?")[0])
        line = f"{self.command} {path}"
        self.server.requests.append((line, {name.lower(): value for name, value in self.headers.items()}))
        self.body = None
        self.fault = self.server.faults.take(line)
        if isinstance(self.fault, Slow):
            time.sleep(self.fault.seconds)
        if isinstance(self.fault, Cut) and self.command in ("PUT", "POST"):
            self.rfile.read(self.fault.after_bytes)
            self.hang_up()
            return
        if isinstance(self.fault, Status):
            self.read_body()
            self.give(self.fault.code, b"", self.fault.headers)
            return
        try:
            self.dispatch(path)
        except Refusal as refusal:
            self.read_body()
            headers = {"X-Error-Message": refusal.message}
            if refusal.code:
                headers["X-Error-Code"] = refusal.code
            self.give(refusal.status, json.dumps({"error": refusal.message}).encode(), headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def dispatch(self, path: str) -> None:
        method = "GET" if self.command == "HEAD" else self.command
        for name in dir(type(self)):
            marked = getattr(getattr(type(self), name), "route", None)
            if marked is not None and marked[0] == method:
                found = marked[1].fullmatch(path)
                if found:
                    getattr(self, name)(**found.groupdict())
                    return
        raise Refusal(404, f"no such page: {path}")

    def user(self) -> User | None:
        given = self.headers.get("Authorization")
        if given is None:
            return None
        user = self.store.users.get(given.removeprefix("Bearer "))
        if user is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return user

    def repository(self, kind: str, name: str, *, to_read_files: bool = False, to_write: bool = False) -> Repository:
        """Find it, or refuse as the Hub does: a private one looks missing, and a gated one shows its list of files."""
        user = self.user()
        found = self.store.repositories.get((kind, name))
        owns = user is not None and name.startswith(f"{user.name}/")
        if found is None or (found.private and not owns):
            raise Refusal(401 if user is None else 404, "Repository not found", "RepoNotFound")
        if to_read_files and found.gated and not owns and (user is None or user.name not in found.readers):
            raise Refusal(401 if user is None else 403, f"Access to model {name} is restricted", "GatedRepo")
        if to_write and not (owns and user.may_write):
            raise Refusal(403, "You don't have the rights to write here")
        return found

    def commit_of(self, repository: Repository, revision: str) -> str:
        commit = repository.commit_of(revision)
        if commit is None:
            raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def read_body(self) -> bytes:
        if self.body is None:
            self.body = b""
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    self.body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return self.body

    def read_json(self) -> Any:
        return json.loads(self.read_body())

    def give_json(self, value: object, headers: dict[str, str] | None = None) -> None:
        self.give(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def give(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.read_body()
        if isinstance(self.fault, BadBytes):
            body = bytes(byte ^ 1 for byte in body)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(self.fault, Cut):
            self.wfile.write(body[: self.fault.after_bytes])
            self.hang_up()
            return
        self.wfile.write(body)

    def hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Nothing: see `HubServer.requests`."""
