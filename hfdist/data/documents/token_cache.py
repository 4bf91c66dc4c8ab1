"""Tokens of documents, kept on this machine for the next epoch and the next run.

One SQLite file that many processes share: ranks and their loader workers, of several runs. It is only ever an
optimization: whatever is wrong with it costs a warning and the time to tokenize again, never a run.
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

import numpy as np
from filelock import FileLock

from hfdist.data.sources.base import TokenRow

logger = logging.getLogger(__name__)

# Part of every key. To be counted up when `text_encoder.Encoder` gives other tokens for the same text and tokenizer.
_TOKENIZING = 1

_APPLICATION = 0x68666474  # says in the file's header whose it is
_FORMAT = 1
_PAGE_BYTES = 1 << 14
_BUSY_SECONDS = 10.0
# A shard's last use is written down this often, so that reading seldom writes.
_TOUCH_SECONDS = 600
# What one `put` evicts at the most, so that it never holds the others up for long.
_EVICTED_ROWS = 1 << 13
# Some builds of SQLite take 999 values.
_ROWS_A_QUERY = 900
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
_Columns = tuple[int, int, int, int, bytes]


def shard_key(local_identity: str, tokenizer_digest: str) -> str:
    """Give the name under which a shard's tokens are kept, made of all that decides them."""
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
        close = weakref.WeakMethod(self.close)
        os.register_at_fork(before=lambda: (method := close()) and method())

    def get(self, shard: str, rows: Sequence[int]) -> dict[int, TokenRow]:
        """Give those of the rows that are kept, by number; their token arrays are views of one."""
        found: list[_Columns] = []
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
            if self._make_room(connection, sum(len(row[-1]) for row in encoded)):
                number = self._use(connection, shard)
                connection.executemany(f"INSERT OR IGNORE INTO rows VALUES ({number}, ?, ?, ?, ?, ?)", encoded)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _find(self, shard: str, rows: Sequence[int]) -> list[_Columns]:
        """Give the rows that are kept; sqlite3.DatabaseError: one is not as it was written."""
        connection = self._connect()
        known = connection.execute("SELECT id, used FROM shards WHERE key = ?", (shard,)).fetchone()
        if known is None:
            return []
        number, used = known
        found: list[_Columns] = []
        for start in range(0, len(rows), _ROWS_A_QUERY):
            some = rows[start : start + _ROWS_A_QUERY]
            found += connection.execute(
                "SELECT row, text_digest, width, checksum, tokens FROM rows "
                f"WHERE shard = ? AND row IN ({', '.join('?' * len(some))})",
                (number, *some),
            ).fetchall()
        for row, digest, width, checksum, tokens in found:
            if _checksum(row, digest, width, tokens) != checksum:
                raise sqlite3.DatabaseError(f"row {row} is not as it was written")
        if self._may_write and used < max(self._began, time.time() - _TOUCH_SECONDS):
            with self._guard(writes=True):
                connection.execute("UPDATE shards SET used = ? WHERE id = ?", (int(time.time()), number))
        return found

    def _use(self, connection: sqlite3.Connection, shard: str) -> int:
        """Give the number of a shard, new or known, and write down its use."""
        connection.execute(
            "INSERT INTO shards (key, used) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET used = excluded.used",
            (shard, int(time.time())),
        )
        (number,) = connection.execute("SELECT id FROM shards WHERE key = ?", (shard,)).fetchone()
        return int(number)

    def _make_room(self, connection: sqlite3.Connection, new_bytes: int) -> bool:
        """Evict shards of earlier runs until there is room for `new_bytes`; whether there is.

        The pages that this frees are used again, so that the file does not grow.
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
        """Turn what is wrong with the file into a warning, and go on without it, or without adding to it.

        A damaged file is left as it is: other processes may have it open, and SQLite finds a file by its name.
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
    """Make the tables where the file is new; sqlite3.DatabaseError where it is something else."""
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
    query = "SELECT page_count - freelist_count FROM pragma_page_count(), pragma_freelist_count()"
    return int(connection.execute(query).fetchone()[0]) * _PAGE_BYTES


def _encode(rows: Mapping[int, TokenRow]) -> list[_Columns]:
    """Rows as they are kept: little-endian, in the narrowest type that holds them all, in order of their numbers."""
    numbers = sorted(rows)
    tokens = np.concatenate([rows[number].tokens for number in numbers])
    # Complements of context tokens are negative, and come back as such from four bytes.
    width = 2 if tokens.min(initial=0) >= 0 and tokens.max(initial=0) < 1 << 16 else 4
    whole = memoryview(tokens.astype(f"<u{width}").tobytes())
    encoded, start = [], 0
    for number in numbers:
        row = rows[number]
        stop = start + width * len(row.tokens)
        blob = bytes(whole[start:stop])
        # SQLite's integers are signed.
        digest = row.text_digest - (1 << 63)
        encoded.append((number, digest, width, _checksum(number, digest, width, blob), blob))
        start = stop
    return encoded


def _checksum(row: int, digest: int, width: int, tokens: bytes) -> int:
    return zlib.crc32(tokens, (row ^ width ^ digest ^ digest >> 32) & 0xFFFFFFFF)


def _decode(rows: Sequence[_Columns]) -> dict[int, TokenRow]:
    decoded: dict[int, TokenRow] = {}
    for width, alike in groupby(rows, key=lambda columns: columns[2]):
        together = list(alike)
        tokens = np.frombuffer(b"".join([columns[-1] for columns in together]), f"<u{width}").astype(np.int32)
        tokens.flags.writeable = False
        start = 0
        for number, digest, _, _, blob in together:
            stop = start + len(blob) // width
            decoded[number] = TokenRow(tokens[start:stop], digest + (1 << 63))
            start = stop
    return decoded
