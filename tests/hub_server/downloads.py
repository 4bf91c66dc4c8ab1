"""Routes that read: what a repository holds, its files with hashes and ranges, large ones from another origin."""

from __future__ import annotations

import hashlib
import re

from tests.hub_server.handler import Handler, Refusal, route
from tests.hub_server.repositories import Repository, blob_id, is_large

_REPOSITORY = r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"


class Downloads(Handler):
    """As the Hub answers to readers."""

    @route("GET", _REPOSITORY)
    def info(self, kind: str, name: str) -> None:
        self.info_at(kind, name, "main")

    @route("GET", _REPOSITORY + r"/revision/(?P<revision>.+)")
    def info_at(self, kind: str, name: str, revision: str) -> None:
        repository = self.repository(kind, name)
        commit = self.commit_of(repository, revision)
        files = [{"rfilename": path} for path in repository.files(commit)]
        self.give_json({"id": name, "sha": commit, "private": repository.private, "siblings": files, "tags": []})

    @route("GET", _REPOSITORY + r"/tree/(?P<revision>[^/]+)(?P<folder>/.*)?")
    def tree(self, kind: str, name: str, revision: str, folder: str | None) -> None:
        repository = self.repository(kind, name)
        files = repository.files(self.commit_of(repository, revision))
        below = {path: c for path, c in files.items() if path.startswith((folder or "").strip("/"))}
        self.give_json([_describe(path, content) for path, content in below.items()])

    @route("POST", _REPOSITORY + r"/paths-info/(?P<revision>.+)")
    def paths_info(self, kind: str, name: str, revision: str) -> None:
        repository = self.repository(kind, name)
        files = repository.files(self.commit_of(repository, revision))
        body = self.read_body().decode()
        paths = [path for path in files if path in body]
        self.give_json([_describe(path, files[path]) for path in paths])

    @route("GET", r"/(?P<kind>datasets/)?(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
    def resolve(self, kind: str | None, name: str, revision: str, path: str) -> None:
        repository = self.repository("datasets" if kind else "models", name, to_read_files=True)
        commit = self.commit_of(repository, revision)
        content = self.find(repository, commit, path)
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if is_large(path, len(content)):
            digest = hashlib.sha256(content).hexdigest()
            signed = f"{self.server.storage_url}/storage/{digest}?Signature=secret-of-the-storage"
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content)), "Location": signed}
            self.give(302, b"", headers)
            return
        self.give_range(content, {**headers, "ETag": f'"{blob_id(content)}"'})

    @route("GET", r"/storage/(?P<digest>[0-9a-f]{64})")
    def storage(self, digest: str) -> None:
        self.give_range(self.store.large[digest], {"ETag": f'"{digest[:32]}"'})

    def find(self, repository: Repository, commit: str, path: str) -> bytes:
        content = repository.files(commit).get(path)
        if content is None:
            raise Refusal(404, "Entry not found", "EntryNotFound")
        return content

    def give_range(self, content: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self.give(200, content, headers)
            return
        start, last = int(asked[1]), int(asked[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
        self.give(206, content[start : last + 1], headers)


def _describe(path: str, content: bytes) -> dict:
    entry = {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}
    if is_large(path, len(content)):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry
