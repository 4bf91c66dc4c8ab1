"""Repositories in memory: commits of files, who may read and write them, and the large files behind them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

LARGE_BYTES = 10_000
LARGE_SUFFIXES = (".safetensors", ".bin", ".gguf", ".png", ".parquet")


@dataclass(frozen=True)
class User:
    """The owner of a token."""

    name: str
    may_write: bool = True


def is_large(path: str, size: int) -> bool:
    return path.endswith(LARGE_SUFFIXES) or size > LARGE_BYTES


def blob_id(content: bytes) -> str:
    """Git's name of a small file."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


@dataclass
class Repository:
    """Branches and commits. A commit is a mapping of paths to contents."""

    name: str
    private: bool = False
    gated: bool = False
    readers: set[str] = field(default_factory=set)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, changes: dict[str, bytes], message: str = "", branch: str = "main") -> str:
        before = self.commits.get(self.branches.get(branch, ""), {})
        number = f"{self.name} {branch} {len(self.commits)}".encode()
        commit = hashlib.sha1(number).hexdigest()
        self.commits[commit] = {**before, **changes}
        self.branches[branch] = commit
        self.messages.append(message)
        return commit

    def commit_of(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)

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
            root = files
            files = {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        repository = Repository(name, **access)
        repository.commit(files)
        for content in files.values():
            self.large[hashlib.sha256(content).hexdigest()] = content
        self.repositories[kind, name] = repository
        return repository
