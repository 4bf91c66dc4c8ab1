"""What generators of other machines may read of a run: its model, a saved adapter, the tokenizer, and the policy."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from hfdist.messages.message import Message
from hfdist.tune.generators.chunks import CHUNK_BYTES, Listing, list_file, write_listing
from hfdist.tune.generators.policy_files import PolicyFiles

MODEL, ADAPTER, TOKENIZER, POLICY = "model", "adapter", "tokenizer", "policy"
"""What is asked for, by the key `of` of a question."""
_MOST_VERSIONS = 8
"""Versions whose hashes are kept: more are never in use for long."""


class ServedFiles:
    """Lists files with their hashes, each once, and finds the chunks that are asked for.

    Args:
        own: files by name, by what they are of; all of them stay as they are.
        policy: versions, which come and go.
    """

    def __init__(self, own: Mapping[str, Mapping[str, Path]], policy: PolicyFiles) -> None:
        self._own, self._policy = own, policy
        self._lock = threading.Lock()
        self._listed: dict[tuple[str, int, int], Listing] = {}

    def list(self, asked: Message) -> dict[str, object]:
        """List the files of a question, as JSON; FileNotFoundError: there are none any more, or never were.

        The first call reads all of them.
        """
        key = _key(asked)
        # Several that ask at once wait for one reading.
        with self._lock:
            if key not in self._listed:
                paths = self._paths(key)
                self._listed[key] = {name: list_file(path) for name, path in paths.items()}
                versions = [one for one in self._listed if one[0] == POLICY]
                for old in versions[:-_MOST_VERSIONS]:
                    del self._listed[old]
            return write_listing(self._listed[key])

    def find(self, asked: Message) -> tuple[Path, int, int]:
        """Give the file of a question, the chunk's first byte and its size; FileNotFoundError: there is none."""
        key, name, chunk = _key(asked), asked.text("file"), asked.integer("chunk")
        file = self._listed.get(key, {}).get(name)
        if file is None or chunk >= len(file.hashes):
            raise FileNotFoundError(name)
        return self._paths(key)[name], chunk * CHUNK_BYTES, file.size_of(chunk)

    def _paths(self, key: tuple[str, int, int]) -> Mapping[str, Path]:
        of, rollback, version = key
        if of == POLICY:
            return {path.name: path for path in self._policy.files(rollback, version)}
        if of not in self._own:
            raise FileNotFoundError(of)
        return self._own[of]


def _key(asked: Message) -> tuple[str, int, int]:
    of = asked.text("of")
    # Other files have no versions: they are listed once, whatever is asked.
    return (of, asked.integer("rollback"), asked.integer("version")) if of == POLICY else (of, 0, 0)
