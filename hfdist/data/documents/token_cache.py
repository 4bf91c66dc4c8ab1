"""The cache of tokens: documents that were tokenized are kept on this machine for the next epoch and the next run.

It is one SQLite file that many processes share: ranks and their loader workers, of several runs. It only saves time:
whatever is wrong with the file costs a warning and the time to tokenize again, never a run.

    shards   (id, key, used)                                       a row for each shard; `used`: seconds since 1970
    rows     (shard, row, text_digest, width, checksum, tokens)    a row for each document; `width`: bytes of a token
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sqlite3
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock

from hfdist.data.sources.base import TokenRow

logger = logging.getLogger(__name__)

_TOKENIZING = 1
"""Version in every key; it is raised when the same text and tokenizer give other tokens."""

_APPLICATION = 0x68666474
"""Number in the header of the file, which says that it is a token cache."""
_FORMAT = 1
"""Version of the tables."""
_PAGE_BYTES = 1 << 14
_BUSY_SECONDS = 10.0
"""Seconds for which a process waits for others that write."""
_TOUCH_SECONDS = 600
"""Seconds between two notes of a shard's use, so that reading seldom writes."""
_EVICTED_ROWS = 1 << 13
"""Rows that one `put` evicts at the most, so that it never holds the others up for long."""
_ROWS_A_QUERY = 900
"""Rows that one query asks for: some builds of SQLite take no more than 999 values."""
_DIGEST_SHIFT = 1 << 63
"""Number that makes a hash below 2**64 an integer of SQLite, which has a sign."""
_SCHEMA = f"""
BEGIN IMMEDIATE;
CREATE TABLE shards (id INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE, used INTEGER NOT NULL);
CREATE INDEX shards_used ON shards (used);
CREATE TABLE rows (shard INTEGER, row INTEGER, text_digest INTEGER NOT NULL, width INTEGER NOT NULL,
                   checksum INTEGER NOT NULL, tokens BLOB NOT NULL, PRIMARY KEY (shard, row)) WITHOUT ROWID;
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_FORMAT};
COMMIT;
"""


class _StoredRow(NamedTuple):
    """A row of the table `rows`, without its shard."""

    row: int
    text_digest: int
    """Hash of the text, less `_DIGEST_SHIFT`."""
    width: int
    """Bytes of a token: 2, or 4 with a sign."""
    checksum: int
    tokens: bytes
    """Tokens, little-endian."""


def shard_key(local_identity: str, tokenizer_digest: str) -> str:
    """Give the key of a shard's tokens: a hash of all that decides them."""
    text = json.dumps([_TOKENIZING, local_identity, tokenizer_digest])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class TokenCache:
    """Tokens by shard and row, in a file on a disk of this machine (not on one that machines share).

    When it is full, the shards that were used longest ago make room, except those that were used since this object
    was made: a run whose corpus is larger than the cache keeps what it has and stores no more, since epochs come back
    in a mixed order, in which making room would push everything out before it is read again.

    To be used by one thread of a process. Forks may use it too: the connection is closed before each fork, because
    SQLite's locks do not survive one, and opened again on the next use.
    """

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        """Open nothing yet. `max_bytes` bounds the file at `path` and its companions with a suffix; 0 keeps nothing."""
        self._path, self._max_bytes = path, max_bytes
        self._may_read = self._may_write = max_bytes > 0
        self._began = int(time.time())
        self._connection: sqlite3.Connection | None = None
        # A weak reference, since the handler lives as long as the process.
        weak_close = weakref.WeakMethod(self.close)

        def close_before_fork() -> None:
            close = weak_close()
            if close is not None:
                close()

        os.register_at_fork(before=close_before_fork)

    def get(self, shard: str, rows: Sequence[int]) -> dict[int, TokenRow]:
        """Give the rows of a shard that are kept, by their numbers; tokens may be views of one read-only array."""
        found: list[_StoredRow] = []
        if self._may_read and rows:
            with self._guard(writes=False):
                found = self._find(shard, rows)
        return _decode(found)

    def put(self, shard: str, rows: Mapping[int, TokenRow]) -> None:
        """Keep rows of a shard by number: all or, when there is no room, none."""
        if not self._may_write or not rows:
            return
        encoded = _encode(rows)
        # The connection commits, or rolls back what an error has not rolled back already.
        with self._guard(writes=True), self._connect() as connection:
            connection.execute("BEGIN IMMEDIATE")
            if self._make_room(connection, sum(len(row.tokens) for row in encoded)):
                number = self._use(connection, shard)
                connection.executemany(f"INSERT OR IGNORE INTO rows VALUES ({number}, ?, ?, ?, ?, ?)", encoded)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _find(self, shard: str, rows: Sequence[int]) -> list[_StoredRow]:
        """Give the rows that are kept; sqlite3.DatabaseError: one is not as it was written."""
        connection = self._connect()
        known = connection.execute("SELECT id, used FROM shards WHERE key = ?", (shard,)).fetchone()
        if known is None:
            return []
        number, used = known
        found: list[_StoredRow] = []
        for start in range(0, len(rows), _ROWS_A_QUERY):
            some = rows[start : start + _ROWS_A_QUERY]
            cursor = connection.execute(
                "SELECT row, text_digest, width, checksum, tokens FROM rows "
                f"WHERE shard = ? AND row IN ({', '.join('?' * len(some))})",
                (number, *some),
            )
            found += map(_StoredRow._make, cursor)
        for stored in found:
            if _checksum(stored.row, stored.text_digest, stored.width, stored.tokens) != stored.checksum:
                raise sqlite3.DatabaseError(f"row {stored.row} is not as it was written")
        if self._may_write and used < max(self._began, time.time() - _TOUCH_SECONDS):
            with self._guard(writes=True):
                connection.execute("UPDATE shards SET used = ? WHERE id = ?", (int(time.time()), number))
        return found

    def _use(self, connection: sqlite3.Connection, shard: str) -> int:
        """Give the id of a shard, new or known, and note that it is used now."""
        connection.execute(
            "INSERT INTO shards (key, used) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET used = excluded.used",
            (shard, int(time.time())),
        )
        (number,) = connection.execute("SELECT id FROM shards WHERE key = ?", (shard,)).fetchone()
        return int(number)

    def _make_room(self, connection: sqlite3.Connection, new_bytes: int) -> bool:
        """Evict shards that earlier runs used until there is room for `new_bytes`; give whether there is.

        SQLite uses the pages that this frees again, so that the file does not grow.
        """
        left_rows = _EVICTED_ROWS
        while _used_bytes(connection) + new_bytes > self._max_bytes:
            oldest = connection.execute(
                "SELECT id FROM shards WHERE used < ? ORDER BY used LIMIT 1", (self._began,)
            ).fetchone()
            if oldest is None or left_rows <= 0:
                return False
            deleted = connection.execute(
                "DELETE FROM rows WHERE shard = ?1 AND row IN (SELECT row FROM rows WHERE shard = ?1 LIMIT ?2)",
                (*oldest, left_rows),
            ).rowcount
            if deleted < left_rows:
                connection.execute("DELETE FROM shards WHERE id = ?", oldest)
            left_rows -= deleted
        return True

    @contextmanager
    def _guard(self, *, writes: bool) -> Iterator[None]:
        """Turn an error of the file into a warning; after it, nothing is added, and perhaps nothing is read any more.

        Reading goes on only if a write has failed in a file that could be opened. A damaged file is left as it is:
        other processes may have it open, and SQLite finds a file by its name.
        """
        try:
            yield
        except (sqlite3.DatabaseError, OSError) as error:
            is_open = self._connection is not None
            self.close()
            self._may_write = False
            self._may_read = self._may_read and writes and is_open
            use = "for new tokens" if self._may_read else "at all"
            is_damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
            hint = f"; delete {self._path}* while no run uses it" if is_damaged else ""
            logger.warning("the token cache %s is not used %s from here on: %s%s", self._path, use, error, hint)

    def _connect(self) -> sqlite3.Connection:
        """Give the open connection, or open one."""
        if self._connection is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # One process at a time makes the file.
            with FileLock(f"{self._path}.lock", timeout=_BUSY_SECONDS):
                connection = sqlite3.connect(
                    self._path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
                )
                try:
                    _prepare(connection)
                except sqlite3.DatabaseError:
                    connection.close()
                    raise
            self._connection = connection
        return self._connection


def _prepare(connection: sqlite3.Connection) -> None:
    """Make the tables of a new file; sqlite3.DatabaseError: the file is no token cache of this version."""
    connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if num_tables and (application, version) != (_APPLICATION, _FORMAT):
        raise sqlite3.DatabaseError("it is not a token cache of this version")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute(f"PRAGMA journal_size_limit = {1 << 26}")
    if not num_tables:
        connection.executescript(_SCHEMA)


def _used_bytes(connection: sqlite3.Connection) -> int:
    """Give the bytes of the file that hold something."""
    query = "SELECT page_count - freelist_count FROM pragma_page_count(), pragma_freelist_count()"
    return int(connection.execute(query).fetchone()[0]) * _PAGE_BYTES


def _encode(rows: Mapping[int, TokenRow]) -> list[_StoredRow]:
    """Encode rows in order of their numbers, in the narrowest type that holds the tokens of all of them."""
    numbers = sorted(rows)
    tokens = np.concatenate([rows[number].tokens for number in numbers])
    # Complements of context tokens are negative: four bytes give them back with their sign.
    width = 2 if tokens.min(initial=0) >= 0 and tokens.max(initial=0) < 1 << 16 else 4
    whole = memoryview(tokens.astype(f"<u{width}").tobytes())
    encoded: list[_StoredRow] = []
    start = 0
    for number in numbers:
        row = rows[number]
        stop = start + width * len(row.tokens)
        blob = bytes(whole[start:stop])
        digest = row.text_digest - _DIGEST_SHIFT
        encoded.append(_StoredRow(number, digest, width, _checksum(number, digest, width, blob), blob))
        start = stop
    return encoded


def _checksum(row: int, digest: int, width: int, tokens: bytes) -> int:
    """Give the CRC-32 of the tokens of a row, begun with what else the row holds."""
    return zlib.crc32(tokens, (row ^ width ^ digest ^ digest >> 32) & 0xFFFFFFFF)


def _decode(rows: Sequence[_StoredRow]) -> dict[int, TokenRow]:
    """Decode rows, by number; those of one width are decoded together, which is faster than one by one."""
    decoded: dict[int, TokenRow] = {}
    for width, group in groupby(rows, key=lambda stored: stored.width):
        alike = list(group)
        tokens = np.frombuffer(b"".join([stored.tokens for stored in alike]), f"<u{width}").astype(np.int32)
        tokens.flags.writeable = False
        start = 0
        for stored in alike:
            stop = start + len(stored.tokens) // width
            decoded[stored.row] = TokenRow(tokens[start:stop], stored.text_digest + _DIGEST_SHIFT)
            start = stop
    return decoded
