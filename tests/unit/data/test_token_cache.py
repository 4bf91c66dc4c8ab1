"""The token cache: gives what was put, to many processes, survives kills and damage, and stays in its bounds."""

import logging
import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import time

import numpy as np
import pytest

from hfdist.data.documents.token_cache import TokenCache, shard_key
from hfdist.data.sources.base import TokenRow

LARGE = 1 << 30
KEY = shard_key("a file", "a tokenizer")


def row_of(number, *, length=None, largest=60_000):
    """A document that is made of its number."""
    source = np.random.default_rng(number)
    tokens = source.integers(0, largest, number % 300 if length is None else length, dtype=np.int32)
    return TokenRow(tokens, int(source.integers(0, 2**64, dtype=np.uint64)))


def check(found, number, **shape):
    wanted = row_of(number, **shape)
    assert found.tokens.dtype == np.int32
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.text_digest == wanted.text_digest


def rows_of(numbers, **shape):
    return {number: row_of(number, **shape) for number in numbers}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache" / "tokens.sqlite"


def test_it_gives_what_was_put(path):
    cache = TokenCache(path, max_bytes=LARGE)
    numbers = random.Random(0).sample(range(5000, 5400), 400)
    assert cache.get(KEY, numbers) == {}
    cache.put(KEY, rows_of(numbers[:100]))
    # Some again, and one with a token that needs 32 bits.
    wide = 5400
    cache.put(KEY, {**rows_of(numbers[50:200]), wide: row_of(wide, length=7, largest=2**31)})
    cache.put(shard_key("another file", "a tokenizer"), rows_of([9, 5001], length=3))
    for reader in (cache, TokenCache(path, max_bytes=LARGE)):
        found = reader.get(KEY, [*numbers, wide])
        assert set(found) == {*numbers[:200], wide}
        check(found.pop(wide), wide, length=7, largest=2**31)
        for number, row in found.items():
            check(row, number)
        assert set(reader.get(KEY, numbers[3:5])) == set(numbers[3:5])
    assert cache.get(shard_key("a file", "another tokenizer"), numbers) == {}


def test_it_may_be_switched_off(path):
    cache = TokenCache(path, max_bytes=0)
    cache.put(KEY, rows_of([1]))
    assert cache.get(KEY, [1]) == {}
    assert not path.parent.exists()


def write_for_ever(path, first_row, started):
    cache = TokenCache(path, max_bytes=LARGE)
    for first in range(first_row, 10**9, 16):
        cache.put(KEY, rows_of(range(first, first + 16)))
        started.set()


def test_writers_may_be_killed_at_any_moment(path, caplog):
    fork = multiprocessing.get_context("fork")
    # Open while the workers are forked, as in a rank.
    cache = TokenCache(path, max_bytes=LARGE)
    cache.put(KEY, rows_of([0]))
    chance = random.Random(0)
    for first_rows in ((100_000 * n, 100_000 * (n + 1)) for n in range(1, 7, 2)):
        started = [fork.Event() for _ in first_rows]
        workers = [
            fork.Process(target=write_for_ever, args=(path, *args)) for args in zip(first_rows, started, strict=True)
        ]
        for worker in workers:
            worker.start()
        assert all(event.wait(20) for event in started)
        time.sleep(chance.uniform(0, 0.05))
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
        for first in first_rows:
            found = cache.get(KEY, range(first, first + 1600))
            assert len(found) >= 16
            assert len(found) % 16 == 0  # a put is kept whole or not at all
            for number, row in found.items():
                check(row, number)
    cache.close()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert not caplog.records


def test_forks_go_on_with_connections_of_their_own(path):
    cache = TokenCache(path, max_bytes=LARGE)
    cache.put(KEY, rows_of(range(50)))

    def use(number):
        check(cache.get(KEY, [number])[number], number)
        cache.put(KEY, rows_of([1000 + number]))

    workers = [multiprocessing.get_context("fork").Process(target=use, args=(n,)) for n in range(6)]
    for worker in workers:
        worker.start()
        check(cache.get(KEY, [7])[7], 7)
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * 6
    assert set(cache.get(KEY, range(1000, 1010))) == set(range(1000, 1006))


def overwrite(path, first, size):
    with path.open("r+b") as file:
        file.seek(first)
        file.write(os.urandom(size))


def empty_database(path):
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE letters (text TEXT)")
    connection.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"no database, but long enough to be taken for one" * 400),
        lambda path: overwrite(path, 0, 200),
        lambda path: overwrite(path, 5 << 14, 3 << 14),
        lambda path: os.truncate(path, path.stat().st_size // 2 + 1000),
        lambda path: (path.unlink(), empty_database(path)),
    ],
    ids=["text", "header", "pages", "cut off", "foreign"],
)
def test_a_damaged_file_is_left_alone_and_named(path, damage, caplog):
    cache = TokenCache(path, max_bytes=LARGE)
    cache.put(KEY, rows_of(range(600)))
    cache.close()
    damage(path)
    before = path.read_bytes()
    # Whichever meets it first.
    with caplog.at_level(logging.WARNING):
        cache.get(KEY, range(600))
        cache.put(KEY, rows_of(range(600)))
        assert cache.get(KEY, range(600)) == {}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"delete {path}*" in caplog.text
    assert path.read_bytes() == before


def test_a_flipped_bit_is_never_given(path, caplog):
    cache = TokenCache(path, max_bytes=LARGE)
    cache.put(KEY, {0: TokenRow(np.full(1000, 0x1234, dtype=np.int32), 1)})
    cache.close()
    content = path.read_bytes()
    place = content.index(b"\x34\x12" * 900) + 1001
    path.write_bytes(content[:place] + bytes([content[place] ^ 8]) + content[place + 1 :])
    assert cache.get(KEY, [0]) == {}
    assert "is not as it was written" in caplog.text


def test_a_folder_that_cannot_be_made_costs_one_warning(tmp_path, caplog):
    (tmp_path / "file").touch()
    cache = TokenCache(tmp_path / "file" / "tokens.sqlite", max_bytes=LARGE)
    for _ in range(3):
        cache.put(KEY, rows_of([1]))
        assert cache.get(KEY, [1]) == {}
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def full_disk(path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10_000, limits[1]))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def locked(path):
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    return other.close


@pytest.mark.parametrize("hinder", [full_disk, locked])
def test_what_cannot_be_written_costs_one_warning(path, hinder, caplog, monkeypatch):
    monkeypatch.setattr("hfdist.data.documents.token_cache._BUSY_SECONDS", 0.05)
    cache = TokenCache(path, max_bytes=LARGE)
    cache.put(KEY, rows_of([1]))
    free = hinder(path)
    try:
        for number in range(2, 5):
            cache.put(KEY, {number: row_of(number, length=1_000_000)})
    finally:
        free()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    found = cache.get(KEY, range(5))
    assert list(found) == [1]
    check(found[1], 1)


def test_shards_of_earlier_runs_make_room_and_those_of_this_run_stay(path, caplog):
    most_bytes = 4 << 20
    keys = [shard_key(f"file {n}", "a tokenizer") for n in range(12)]
    rows = rows_of(range(100), length=2000)  # 400 kB a shard

    old = TokenCache(path, max_bytes=most_bytes)
    for n, key in enumerate(keys[:6]):
        old.put(key, rows)
        old._connect().execute("UPDATE shards SET used = ? WHERE key = ?", (n + 1, key))
    old.close()

    new = TokenCache(path, max_bytes=most_bytes)
    new.get(keys[0], [1])  # the oldest, but in use again
    for key in keys[6:]:
        new.put(key, rows)
    kept = [n for n, key in enumerate(keys) if len(new.get(key, range(100))) == 100]
    gone = [n for n, key in enumerate(keys) if not new.get(key, range(100))]
    assert kept == [0, *range(13 - len(kept), 12)]
    assert gone == list(range(1, 13 - len(kept)))
    assert len(kept) >= 8

    # All that is left is in use: nothing is pushed out, and nothing is added.
    for n in range(20, 40):
        new.put(shard_key(f"file {n}", "a tokenizer"), rows)
    assert [n for n, key in enumerate(keys) if new.get(key, [1])] == kept
    assert path.stat().st_size <= most_bytes + (1 << 20)
    assert not caplog.records
