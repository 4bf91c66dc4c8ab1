"""Copies are shared by the processes of a machine, bounded in bytes, and survive whatever ends a process."""

import contextlib
import gc
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from hfdist.data import cache as array_cache
from hfdist.data.storage import identity
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.files import LocalFile
from hfdist.data.storage.find import find_files
from hfdist.data.storage.network import Network, Retries
from hfdist.data.threads import thread_map
from hfdist.errors import ResourceError
from tests.unit.data.servers import Slow

FORK = multiprocessing.get_context("fork")
CONTENT = random.Random(0).randbytes(100_000)


@pytest.fixture
def cache(tmp_path):
    return FileCache(tmp_path / "cache", 250_000, Network(Retries(first_wait_seconds=0.01)))


def find(address, cache):
    return find_files(address, key="data.sources.x.path", suffixes=(".txt",), cache=cache)


@pytest.fixture
def files(web, cache):
    """Four files, of which the cache has room for two."""
    web.files = {f"/{name}.txt": name.encode() + CONTENT[1:] for name in "abcd"}
    found = find(web.url, cache)
    web.requests.clear()
    return found


def kept(cache):
    """The first letter of each file in the cache."""
    paths = [path for path in (cache.folder / "files").iterdir() if path.suffix != ".part"]
    return "".join(sorted(path.read_bytes()[:1].decode() for path in paths))


def leftovers(cache):
    return list((cache.folder / "files").glob("*.part"))


def fetch(file):
    with file.local() as path:
        assert path.read_bytes()[1:] == CONTENT[1:]


def ask_and_fetch(file):
    # Sooner or later it comes by itself; what is closed then must not be the parent's.
    gc.collect()
    file.check_unchanged()
    fetch(file)


def hold(file, ready):
    with file.local():
        ready.set()
        time.sleep(60)


@contextlib.contextmanager
def forked(function, *arguments):
    process = FORK.Process(target=function, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_processes_that_ask_at_once_fetch_once(files, web, cache):
    web.faults["/a.txt"] = [Slow(0), Slow(0.2)]
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(forked(fetch, files[0])) for _ in range(4)]
        for process in processes:
            process.join(20)
        assert [process.exitcode for process in processes] == [0] * 4
    assert web.asked("GET") == 1
    assert kept(cache) == "a"
    assert not leftovers(cache)


def test_a_process_killed_while_it_fetches_is_taken_over_from(files, web, cache):
    web.faults["/a.txt"] = [Slow(0), Slow(5)]
    with forked(fetch, files[0]) as first:
        until(lambda: web.asked("GET") == 1)
        with forked(fetch, files[0]) as second:
            time.sleep(0.1)
            assert second.is_alive()
            assert web.asked("GET") == 1
            os.kill(first.pid, signal.SIGKILL)
            second.join(20)
            assert second.exitcode == 0
    assert web.asked("GET") == 2
    assert kept(cache) == "a"
    assert not leftovers(cache)


def test_the_file_used_longest_ago_goes_first(files, web, cache):
    for number in (0, 1, 0, 2):
        fetch(files[number])
    assert kept(cache) == "ac"
    assert web.asked("GET") == 3
    fetch(files[0])
    assert web.asked("GET") == 3


def test_files_that_are_read_stay_until_their_reader_ends(files, cache, caplog):
    ready = FORK.Event()
    with forked(hold, files[0], ready) as reader:
        assert ready.wait(10)
        fetch(files[1])
        fetch(files[2])
        assert kept(cache) == "ac"
        with files[2].local(), files[1].local(), caplog.at_level(logging.WARNING, "hfdist"):
            assert kept(cache) == "abc"
        assert "data.file_cache_bytes=250000" in caplog.text
        os.kill(reader.pid, signal.SIGKILL)
        reader.join()
    fetch(files[3])
    assert "a" not in kept(cache)
    assert len(kept(cache)) == 2


def test_a_damaged_copy_is_fetched_again(files, web, cache):
    fetch(files[0])
    [path] = (cache.folder / "files").iterdir()
    os.truncate(path, 10)
    fetch(files[0])
    assert web.asked("GET") == 2


def test_a_new_version_is_another_copy(files, web, cache):
    fetch(files[0])
    web.replace("/a.txt", b"A" + CONTENT[1:])
    fetch(find(f"{web.url}/a.txt", cache)[0])
    assert kept(cache) == "Aa"


def test_a_file_larger_than_the_cache(files, cache):
    small = FileCache(cache.folder, 99_999, cache.network)
    with pytest.raises(ResourceError) as caught, small.fetch(files[0]):
        pass
    assert "data.file_cache_bytes=100000" in caught.value.hint
    assert caught.value.where.endswith("a.txt")


class Large:
    """A file for which there is no room."""

    def __init__(self, size_bytes):
        self.url, self.key, self.size_bytes = "http://host/large", "0", size_bytes

    def fetch_into(self, file):
        Path("/dev/full").write_bytes(b"no")


@pytest.mark.parametrize("size_bytes", [2**60, 2])
def test_a_full_disk(tmp_path, size_bytes):
    cache = FileCache(tmp_path, 2**62)
    message = f"{size_bytes} bytes needed, [0-9]+ free"
    with pytest.raises(ResourceError, match=message) as caught, cache.fetch(Large(size_bytes)):
        pass
    assert "data.cache_dir" in caught.value.hint
    assert not list((tmp_path / "files").iterdir())


@pytest.mark.parametrize("store", ["http", "s3"])
def test_connections_are_not_shared_over_a_fork(request, cache, store):
    server = request.getfixturevalue("web" if store == "http" else "s3")
    address = f"{server.url}/corpus/a.txt" if store == "http" else "s3://corpus/a.txt"
    server.files["/corpus/a.txt"] = CONTENT
    if store == "s3":
        server.put("a.txt", CONTENT)
    [file] = find(address, cache)
    # What other tests left would cost the child a second each.
    gc.collect()
    for _ in range(2):
        started = time.monotonic()
        with forked(ask_and_fetch, file) as child:
            child.join(20)
            assert child.exitcode == 0
        file.check_unchanged()
        with file.open() as opened:
            assert opened.read() == CONTENT
        assert time.monotonic() - started < 20, "a connection of the other process would be waited for"


def test_headers_are_parsed_by_one_thread_at_a_time(tmp_path, monkeypatch):
    """Two at a time raise SystemError in Python 3.11 and 3.12, about once in a million."""
    np.save(tmp_path / "a.npy", np.arange(3))
    load, inside, most = np.load, threading.Semaphore(0), []

    def watched(*arguments, **named):
        inside.release()
        most.append(inside._value)
        time.sleep(0.01)
        inside.acquire()
        return load(*arguments, **named)

    monkeypatch.setattr(array_cache.np, "load", watched)
    with ThreadPoolExecutor(8) as pool:
        arrays = list(pool.map(lambda _: array_cache.load_array(tmp_path / "a.npy"), range(16)))
    assert all(array.tolist() == [0, 1, 2] for array in arrays)
    assert max(most) == 1


@pytest.mark.parametrize("bad", [0, 500, 999])
def test_the_first_error_is_raised(bad):
    def refuse(number):
        if number >= bad:
            raise ValueError(number)

    with pytest.raises(ValueError, match=f"^{bad}$"):
        list(thread_map(refuse, range(1000)))


def test_as_many_quick_items_as_one_thread_takes_are_done_here():
    assert set(thread_map(lambda _: threading.get_ident(), range(8), least_chunk=8)) == {threading.get_ident()}


def test_an_error_does_not_wait_for_what_nobody_takes_any_more():
    called = []

    def fail_at_once(number):
        called.append(number)
        if number == 0:
            raise ValueError("no such file")
        time.sleep(0.001)

    with pytest.raises(ValueError, match="no such file"):
        list(thread_map(fail_at_once, range(5000)))

    assert len(called) < 1000


def test_small_files_and_those_with_kept_hashes_take_few_threads(tmp_path, monkeypatch):
    begun, start = [], threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: begun.append(thread) or start(thread))
    # Hashes of what was changed just now are not kept.
    monkeypatch.setattr(identity, "_RECENT_NS", -1)
    paths = [tmp_path / f"{number}" for number in range(24)]
    for number, path in enumerate(paths):
        path.write_bytes(b"x" * (2 * identity.SAMPLE_BYTES + number % 2))

    def read():
        begun.clear()
        files = [LocalFile(path, path.name) for path in paths]
        identity.read_contents(files, tmp_path / "cache")
        return [file.contents.tolist() for file in files]

    first = read()
    assert read() == first
    assert len(begun) <= 3


class Small:
    url, size_bytes, key = "http://h/small", 3, "small"

    def fetch_into(self, file):
        file.write(b"abc")


def test_a_process_without_a_standard_input_keeps_no_lock(tmp_path):
    """There the first file that is opened has number 0."""
    cache = FileCache(tmp_path, 100)

    def fetch_often():
        os.close(0)
        for _ in range(2):
            with cache.fetch(Small()) as path:
                assert path.read_bytes() == b"abc"
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(0)

    with forked(fetch_often) as process:
        process.join()
        assert process.exitcode == 0
