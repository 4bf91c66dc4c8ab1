"""A server on this machine that speaks the Hub's HTTP API, for the real client, and that can be told to fail."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

_REPOSITORY = r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"


# Repositories in memory


@dataclass(frozen=True)
class User:
    """The owner of a token."""

    name: str
    may_write: bool = True


def is_large(path: str, content_bytes: int) -> bool:
    return path.endswith((".safetensors", ".bin", ".gguf", ".png", ".parquet")) or content_bytes > 10_000


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def object_id(path: str, content: bytes) -> str:
    """The name of a large file, and git's name of a small one."""
    if is_large(path, len(content)):
        return sha256(content)
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@dataclass
class Repository:
    """Branches and commits. A commit is a mapping of paths to contents."""

    name: str
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, changes: dict[str, bytes | None], message: str = "", branch: str = "main") -> str:
        before = self.files(branch) if branch in self.branches else {}
        commit = hashlib.sha1(f"{self.name} {branch} {len(self.commits)}".encode()).hexdigest()
        self.commits[commit] = {path: content for path, content in {**before, **changes}.items() if content is not None}
        self.branches[branch] = commit
        self.messages.append(message)
        return commit

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


@dataclass
class Store:
    """All repositories by kind and name, uploaded large files by SHA-256, users by token."""

    repositories: dict[tuple[str, str], Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    users: dict[str, User] = field(default_factory=dict)

    def add(self, name: str, files: dict[str, bytes] | Path, kind: str = "models", **access: object) -> Repository:
        """Make a repository of files, or of those in a folder."""
        if isinstance(files, Path):
            files = {p.relative_to(files).as_posix(): p.read_bytes() for p in files.rglob("*") if p.is_file()}
        repository = self.repositories[kind, name] = Repository(name, **access)
        repository.commit(files)
        self.large |= {sha256(content): content for content in files.values()}
        return repository


TEXTS = ["def add(left, right):\n    return left + right\n", "class Empty:\n    pass\n"] * 20


def write_model(folder: Path, *, max_shard_size: str = "1GB") -> Path:
    """A Llama of two blocks, with its tokenizer."""
    import torch

    from hfdist.models.tokenizer import train_bpe
    from tests.unit.tiny import llama

    tokenizer = train_bpe(TEXTS, 300)
    torch.manual_seed(0)
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = llama(vocab_size=300, num_key_value_heads=1, max_position_embeddings=64, **special)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(folder)
    return folder


# What goes wrong, and with which requests


@dataclass(frozen=True)
class Status:
    """Answer with this status instead."""

    code: int
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """Close the connection after so many bytes of the body: of the answer, or of an upload's request."""

    after_bytes: int


@dataclass(frozen=True)
class Slow:
    """Wait before the answer."""

    seconds: float


@dataclass(frozen=True)
class BadBytes:
    """Send other bytes, as many."""


Fault = Status | Cut | Slow | BadBytes


class Faults:
    """What is planned: the next `times` requests whose line `METHOD /path` matches the pattern meet the fault."""

    def __init__(self) -> None:
        self._planned: list[tuple[str, Fault]] = []
        self._lock = threading.Lock()

    def plan(self, pattern: str, fault: Fault, times: int = 1) -> None:
        self._planned += [(pattern, fault)] * times

    def take(self, line: str) -> Fault | None:
        with self._lock:
            for place, (pattern, fault) in enumerate(self._planned):
                if re.search(pattern, line):
                    del self._planned[place]
                    return fault
        return None


# Answers


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, message: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


ROUTES: list[tuple[str, re.Pattern[str], Callable[..., None]]] = []


def route(method: str, pattern: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a method of the handler the answer to requests of this shape."""

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        ROUTES.append((method, re.compile(pattern), function))
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
            self.give(self.fault.code, b"", self.fault.headers)
            return
        try:
            self.dispatch(path)
        except Refusal as refusal:
            headers = {"X-Error-Message": str(refusal)} | ({"X-Error-Code": refusal.code} if refusal.code else {})
            self.give(refusal.status, json.dumps({"error": str(refusal)}).encode(), headers)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def dispatch(self, path: str) -> None:
        wanted = "GET" if self.command == "HEAD" else self.command
        for method, pattern, function in ROUTES:
            if method == wanted and (found := pattern.fullmatch(path)):
                function(self, **found.groupdict())
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
        if to_read_files and found.gated and not owns:
            raise Refusal(401 if user is None else 403, f"Access to model {name} is restricted", "GatedRepo")
        if to_write and not (owns and user.may_write):
            raise Refusal(403, "You don't have the rights to write here")
        return found

    def commit_of(self, repository: Repository, revision: str) -> str:
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
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

    def give_json(self, value: object) -> None:
        self.give(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def give(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.read_body()
        if isinstance(self.fault, BadBytes):
            body = bytes(byte ^ 1 for byte in body)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if isinstance(self.fault, Cut):
            self.wfile.write(body[: self.fault.after_bytes])
            self.hang_up()
        else:
            self.wfile.write(body)

    def hang_up(self) -> None:
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Nothing: see `HubServer.requests`."""

    # To readers: what a repository holds, its files with hashes and ranges, large ones from another origin.

    @route("GET", _REPOSITORY + r"(/revision/(?P<revision>.+))?")
    def info(self, kind: str, name: str, revision: str | None) -> None:
        repository = self.repository(kind, name)
        commit = self.commit_of(repository, revision or "main")
        files = [{"rfilename": path} for path in repository.files(commit)]
        self.give_json({"id": name, "sha": commit, "private": repository.private, "siblings": files, "tags": []})

    @route("GET", _REPOSITORY + r"/tree/(?P<revision>[^/]+)(?P<folder>/.*)?")
    @route("POST", _REPOSITORY + r"/paths-info/(?P<revision>.+)")
    def paths_info(self, kind: str, name: str, revision: str, folder: str | None = None) -> None:
        repository = self.repository(kind, name)
        asked, found = self.read_body().decode(), []
        for path, content in repository.files(self.commit_of(repository, revision)).items():
            if path in asked if self.command == "POST" else path.startswith((folder or "").strip("/")):
                entry = {"type": "file", "path": path, "size": len(content), "oid": object_id(path, content)}
                if is_large(path, len(content)):
                    entry["lfs"] = {"oid": entry["oid"], "size": len(content), "pointerSize": 130}
                found.append(entry)
        self.give_json(found)

    @route("GET", r"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
    def resolve(self, kind: str | None, name: str, revision: str, path: str) -> None:
        repository = self.repository("datasets" if kind else "models", name, to_read_files=True)
        commit = self.commit_of(repository, revision)
        content = repository.files(commit).get(path)
        if content is None:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        headers, digest = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}, object_id(path, content)
        if is_large(path, len(content)):
            signed = f"{self.server.storage_url}/storage/{digest}?Signature=secret-of-the-storage"
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content)), "Location": signed}
            self.give(302, b"", headers)
        else:
            self.give_range(content, {**headers, "ETag": f'"{digest}"'})

    @route("GET", r"/storage/(?P<digest>[0-9a-f]{64})")
    def storage(self, digest: str) -> None:
        self.give_range(self.store.large[digest], {"ETag": f'"{digest[:32]}"'})

    def give_range(self, content: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self.give(200, content, headers)
            return
        start, last = int(asked[1]), int(asked[2] or len(content) - 1)
        self.give(206, content[start : last + 1], {**headers, "Content-Range": f"bytes {start}-{last}/{len(content)}"})

    # To writers: who am I, new repositories and branches, large files, commits.

    @route("GET", r"/api/whoami-v2")
    def whoami(self) -> User:
        user = self.user()
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        if self.command == "GET":
            self.give_json({"name": user.name, "type": "user", "orgs": []})
        return user

    @route("GET", _REPOSITORY + r"/auth-check/write")
    def may_write(self, kind: str, name: str) -> None:
        self.repository(kind, name, to_write=True)
        self.give_json({})

    @route("POST", r"/api/repos/create")
    def create(self) -> None:
        asked, user = self.read_json(), self.whoami()
        name = f"{asked.get('organization') or user.name}/{asked['name']}"
        if not user.may_write or not name.startswith(f"{user.name}/"):
            raise Refusal(403, "You don't have the rights to create a model under this namespace")
        place = asked.get("type", "model") + "s", name
        if place in self.store.repositories:
            error = {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}
            self.give(409, json.dumps(error).encode(), {})
            return
        created = self.store.repositories[place] = Repository(name, private=asked.get("visibility") == "private")
        created.commit({".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        self.give_json({"url": f"{self.server.url}/{name}"})

    @route("POST", _REPOSITORY + r"/branch/(?P<branch>.+)")
    def create_branch(self, kind: str, name: str, branch: str) -> None:
        repository = self.repository(kind, name, to_write=True)
        if branch in repository.branches:
            raise Refusal(409, "Reference already exists")
        repository.branches[branch] = repository.branches["main"]
        self.give_json({})

    @route("POST", r"/api/validate-yaml")
    def validate_yaml(self) -> None:
        self.give_json({"errors": [], "warnings": []})

    @route("POST", _REPOSITORY + r"/preupload/(?P<revision>.+)")
    def preupload(self, kind: str, name: str, revision: str) -> None:
        repository = self.repository(kind, name, to_write=True)
        present = repository.files(self.commit_of(repository, revision))
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if is_large(file["path"], file["size"]) else "regular",
                "shouldIgnore": False,
                "oid": object_id(file["path"], present[file["path"]]) if file["path"] in present else None,
            }
            for file in self.read_json()["files"]
        ]
        self.give_json({"files": files})

    @route("POST", r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
    def batch(self, name: str) -> None:
        """Say where large files are to be sent: nowhere, if they are here already."""
        self.repository("models", name, to_write=True)
        objects = self.read_json()["objects"]
        for item in objects:
            if item["oid"] not in self.store.large:
                upload = {"href": f"{self.server.storage_url}/upload/{item['oid']}"}
                item["actions"] = {"upload": upload, "verify": {"href": f"{self.server.url}/lfs-verify"}}
        self.give_json({"transfer": "basic", "objects": objects})

    @route("PUT", r"/upload/(?P<digest>[0-9a-f]{64})")
    def upload(self, digest: str) -> None:
        if sha256(self.read_body()) != digest:
            raise Refusal(400, "the content is not that of the hash")
        self.store.large[digest] = self.read_body()
        self.give(200, b"", {})

    @route("POST", r"/lfs-verify")
    def verify(self) -> None:
        asked = self.read_json()
        if len(self.store.large.get(asked["oid"], b"")) != asked["size"]:
            raise Refusal(404, "no such object")
        self.give_json({})

    @route("POST", _REPOSITORY + r"/commit/(?P<revision>.+)")
    def commit(self, kind: str, name: str, revision: str) -> None:
        repository = self.repository(kind, name, to_write=True)
        header, *operations = [json.loads(line) for line in self.read_body().splitlines()]
        changes = {}
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "deletedFile":
                changes[value["path"]] = None
            else:
                assert operation["key"] == "lfsFile", operation["key"]
                changes[value["path"]] = self.store.large[value["oid"]]
        commit = repository.commit(changes, header["value"]["summary"], revision)
        self.give_json({"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit})


class HubServer(ThreadingHTTPServer):
    """Repositories in `store`; what is to go wrong in `faults`; what was asked in `requests`."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.store, self.faults = Store(), Faults()
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.storage_url = f"http://localhost:{self.server_address[1]}"
        """Another origin for large files, to which no token may be sent."""

    def asked(self, beginning: str) -> list[str]:
        """Requests that begin so, as `GET /path`."""
        return [line for line, _ in self.requests if line.startswith(beginning)]

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may leave at any time."""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A server with no repositories, which huggingface_hub asks instead of the Hub, over plain HTTP."""
    home = tmp_path / "hf-home"
    with HubServer() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        # As the environment would set them, were it read again: HF_ENDPOINT, HF_HUB_OFFLINE, HF_HOME, ...
        for name, value in {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_OFFLINE": False,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        close_session()
        yield server
        close_session()
        server.shutdown()
