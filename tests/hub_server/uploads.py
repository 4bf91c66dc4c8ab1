"""Routes that write: who am I, new repositories and branches, large files in one part or several, commits."""

from __future__ import annotations

import base64
import hashlib
import json
from math import ceil

import yaml

from tests.hub_server.handler import Handler, Refusal, route
from tests.hub_server.repositories import Repository, blob_id, is_large

_REPOSITORY = r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+/[^/]+)"


class Uploads(Handler):
    """As the Hub answers to writers."""

    @route("GET", r"/api/whoami-v2")
    def whoami(self) -> None:
        user = self.user()
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        self.give_json({"name": user.name, "type": "user", "orgs": []})

    @route("GET", _REPOSITORY + r"/auth-check/write")
    def may_write(self, kind: str, name: str) -> None:
        self.repository(kind, name, to_write=True)
        self.give_json({})

    @route("POST", r"/api/repos/create")
    def create(self) -> None:
        asked, user = self.read_json(), self.user()
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        name = f"{asked.get('organization') or user.name}/{asked['name']}"
        if not user.may_write or not name.startswith(f"{user.name}/"):
            raise Refusal(403, "You don't have the rights to create a model under this namespace")
        kind = asked.get("type", "model") + "s"
        if (kind, name) in self.store.repositories:
            error = {"error": "You already created this model repo", "url": f"{self.server.url}/{name}"}
            self.give(409, json.dumps(error).encode())
            return
        self.store.repositories[kind, name] = Repository(name, private=asked.get("visibility") == "private")
        self.store.repositories[kind, name].commit({".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
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
        content = self.read_json()["content"]
        if content.startswith("---\n"):
            yaml.safe_load(content.split("---\n")[1])
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
                "oid": _name_of(file["path"], present.get(file["path"])),
            }
            for file in self.read_json()["files"]
        ]
        self.give_json({"files": files})

    @route("POST", r"/(?P<name>[^/]+/[^/]+)\.git/info/lfs/objects/batch")
    def batch(self, name: str) -> None:
        self.repository("models", name, to_write=True)
        self.give_json({"transfer": "basic", "objects": [self.plan(item) for item in self.read_json()["objects"]]})

    def plan(self, item: dict) -> dict:
        """Where a large file is to be sent: nowhere, if it is here already."""
        digest, size = item["oid"], item["size"]
        if digest in self.store.large:
            return item
        verify = {"href": f"{self.server.url}/lfs-verify"}
        url = f"{self.server.storage_url}/upload/{digest}"
        part_bytes = self.server.part_bytes
        if part_bytes is None or size <= part_bytes:
            return {**item, "actions": {"upload": {"href": url}, "verify": verify}}
        parts = {f"{k:05}": f"{url}/part/{k}" for k in range(1, ceil(size / part_bytes) + 1)}
        header = {"chunk_size": str(part_bytes), **parts}
        complete = f"{self.server.url}/lfs-complete"
        return {**item, "actions": {"upload": {"href": complete, "header": header}, "verify": verify}}

    @route("PUT", r"/upload/(?P<digest>[0-9a-f]{64})(?P<part>/part/\d+)?")
    def upload(self, digest: str, part: str | None) -> None:
        content = self.read_body()
        if part is None and hashlib.sha256(content).hexdigest() != digest:
            raise Refusal(400, "the content is not that of the hash")
        self.store.large[digest + (part or "")] = content
        self.give(200, b"", {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'})

    @route("POST", r"/lfs-complete")
    def complete(self) -> None:
        asked = self.read_json()
        parts = [self.store.large.pop(f"{asked['oid']}/part/{part['partNumber']}") for part in asked["parts"]]
        content = b"".join(parts)
        if hashlib.sha256(content).hexdigest() != asked["oid"]:
            raise Refusal(400, "the parts do not make the hash")
        self.store.large[asked["oid"]] = content
        self.give_json({})

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
            else:
                assert operation["key"] == "lfsFile", operation["key"]
                changes[value["path"]] = self.store.large[value["oid"]]
        commit = repository.commit(changes, header["value"]["summary"], revision)
        self.give_json({"commitUrl": f"{self.server.url}/{name}/commit/{commit}", "commitOid": commit})


def _name_of(path: str, content: bytes | None) -> str | None:
    if content is None:
        return None
    return hashlib.sha256(content).hexdigest() if is_large(path, len(content)) else blob_id(content)
