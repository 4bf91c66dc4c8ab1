"""What generators of other machines may read of a run: its model, a saved adapter, the tokenizer, and the policy."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hfdist.messages.message import Message
from hfdist.tune.generators.chunks import CHUNK_BYTES, Listing, list_file, write_listing
from hfdist.tune.generators.policy_files import PolicyFiles

MODEL, ADAPTER, TOKENIZER, POLICY = "model", "adapter", "tokenizer", "policy"
"""Kinds of files; a question names one by its key `of`."""
_MOST_VERSIONS = 8
"""Versions of the policy whose hashes are kept: more are never in use for long."""


class _Source(NamedTuple):
    """A group of files that is listed at once."""

    kind: str
    """MODEL, ADAPTER, TOKENIZER or POLICY."""
    rollback: int = 0
    """How often the run had gone back; 0 but for POLICY."""
    version: int = 0
    """Version of the policy; 0 but for POLICY: other files have no versions."""

    @classmethod
    def of(cls, asked: Message) -> _Source:
        """Read of a question what files it asks for. NotAMessageError: it does not say."""
        kind = asked.text("of")
        if kind != POLICY:
            return cls(kind)
        return cls(kind, asked.integer("rollback"), asked.integer("version"))


class Chunk(NamedTuple):
    """A part of a file."""

    path: Path
    first: int
    """Number of its first byte in the file."""
    num_bytes: int


class ServedFiles:
    """Lists files with their hashes, each once, and finds the chunks that are asked for.

    Args:
        fixed: files by their names, for each kind but POLICY; they stay as they are.
        policy: versions of the policy, which come and go.
    """

    def __init__(self, fixed: Mapping[str, Mapping[str, Path]], policy: PolicyFiles) -> None:
        self._fixed, self._policy = fixed, policy
        self._lock = threading.Lock()
        self._listed: dict[_Source, Listing] = {}

    def list(self, asked: Message) -> dict[str, object]:
        """List the files that a question asks for, as JSON; the first call for a source reads all its files.

        Raises:
            FileNotFoundError: there are none any more, or never were.
            NotAMessageError: it is no question for files.
        """
        source = _Source.of(asked)
        # Several that ask at once wait for one reading.
        with self._lock:
            if source not in self._listed:
                self._listed[source] = {name: list_file(path) for name, path in self._paths(source).items()}
                versions = [listed for listed in self._listed if listed.kind == POLICY]
                for old in versions[:-_MOST_VERSIONS]:
                    del self._listed[old]
            return write_listing(self._listed[source])

    def find(self, asked: Message) -> Chunk:
        """Find the chunk of a listed file that a question asks for.

        Raises:
            FileNotFoundError: there is none, or not any more.
            NotAMessageError: it is no question for a chunk.
        """
        source, name, number = _Source.of(asked), asked.text("file"), asked.integer("chunk")
        file = self._listed.get(source, {}).get(name)
        if file is None or number >= len(file.hashes):
            raise FileNotFoundError(name)
        return Chunk(self._paths(source)[name], number * CHUNK_BYTES, file.size_of(number))

    def _paths(self, source: _Source) -> Mapping[str, Path]:
        if source.kind == POLICY:
            return {path.name: path for path in self._policy.files(source.rollback, source.version)}
        if source.kind not in self._fixed:
            raise FileNotFoundError(source.kind)
        return self._fixed[source.kind]
