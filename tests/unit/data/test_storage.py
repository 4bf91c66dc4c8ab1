"""Files are found and read alike wherever they are, and what a network breaks is tried again, then said."""

import logging
import os
import random
import resource
import time

import pytest

from hfdist.config.checks.urls import redact
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.files import LocalFile
from hfdist.data.storage.find import find_files
from hfdist.data.storage.identity import identify, identify_all, read_contents
from hfdist.data.storage.network import Network, Retries
from hfdist.errors import ConfigError, DataError
from tests.unit.data.servers import Cut

KEY = "data.sources.x.path"
SUFFIXES = (".parquet", ".jsonl", ".txt")
FILES = {"a.txt": b"a" * 10, "deep/b.txt": random.Random(1).randbytes(200_000), "deep/more/c d.jsonl": b""}
OTHERS = {"README.md": b"no", ".cache/a.txt": b"no", "deep/.x.txt": b"no"}
QUICK = Retries(attempts=4, first_wait_seconds=0.01)


@pytest.fixture
def cache(tmp_path):
    return FileCache(tmp_path / "cache", 10**9, Network(QUICK))


def find(path, cache):
    return find_files(str(path), key=KEY, suffixes=SUFFIXES, cache=cache)


def contents(files):
    found = {}
    for file in files:
        with file.local() as path, file.open() as opened:
            found[file.name] = path.read_bytes()
            assert opened.read() == found[file.name]
            assert file.size_bytes == len(found[file.name])
        file.check_unchanged()
    return found


class TestFinding:
    @pytest.fixture(params=["path", "file", "http", "s3", "memory"])
    def root(self, request, tmp_path):
        files = FILES | OTHERS
        if request.param in ("path", "file"):
            for name, content in files.items():
                (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / "data" / name).write_bytes(content)
            return f"{tmp_path}/data" if request.param == "path" else f"file://{tmp_path}/data"
        if request.param == "http":
            server = request.getfixturevalue("web")
            server.files = {f"/data/{name}".replace(" ", "%20"): content for name, content in files.items()}
            return f"{server.url}/data"
        if request.param == "s3":
            server = request.getfixturevalue("s3")
            for name, content in files.items():
                server.put(f"data/{name}", content)
            return "s3://corpus/data"
        from fsspec import filesystem

        filesystem("memory").pipe({f"/data/{name}": content for name, content in files.items()})
        return "memory://data"

    def test_folder_file_and_glob(self, root, cache):
        assert contents(find(root, cache)) == FILES
        assert list(contents(find(root, cache))) == sorted(FILES)
        assert contents(find(f"{root}/deep/", cache)) == {"b.txt": FILES["deep/b.txt"], "more/c d.jsonl": b""}
        assert contents(find(f"{root}/a.txt", cache)) == {"a.txt": FILES["a.txt"]}
        assert list(contents(find(f"{root}/*/*.txt", cache))) == ["deep/b.txt"]
        assert list(contents(find(f"{root}/deep/**/*.jsonl", cache))) == ["more/c d.jsonl"]
        for wrong in (f"{root}/*.parquet", f"{root}/*.md"):
            with pytest.raises(ConfigError) as caught:
                find(wrong, cache)
            assert caught.value.where == KEY

    def test_reading_parts(self, root, cache):
        [file] = find(f"{root}/deep/b.txt", cache)
        expected = FILES["deep/b.txt"]
        with file.open() as opened:
            opened.seek(-100, os.SEEK_END)
            assert opened.read(1000) == expected[-100:]
            opened.seek(70_000)
            assert opened.read(100_000) == expected[70_000:170_000]
            assert opened.tell() == 170_000

    def test_the_identity_is_that_of_a_local_copy(self, root, cache, tmp_path):
        files = find(root, cache)
        for name, content in FILES.items():
            (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "copy" / name).write_bytes(content)
        copies = find(tmp_path / "copy", cache)
        assert identify_all(files, "text") == identify_all(copies, "text")
        assert identify(files[0], "text") != identify(files[0], "other")


def test_a_file_address_is_explained_as_its_path_is(cache, tmp_path):
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "rows.csv").write_text("text\n1\n")
    for path in (tmp_path / "a b", tmp_path / "a b" / "rows.csv", tmp_path / "none.csv"):
        told = []
        for address in (path, f"file://{path}".replace(" ", "%20")):
            with pytest.raises(ConfigError) as caught:
                find(address, cache)
            told.append(caught.value.texts())
        assert told[0] == told[1]
        assert (told[0]["hint"] is None) == (path.name == "none.csv")


def test_a_file_whose_name_looks_like_a_glob(cache, tmp_path):
    for name in ("a[1].txt", "a1.txt"):
        (tmp_path / "x[y]").mkdir(exist_ok=True)
        (tmp_path / "x[y]" / name).write_text(name)
        assert contents(find(tmp_path / "x[y]" / name, cache)) == {name: name.encode()}


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    file = LocalFile(tmp_path / "a.txt", "a.txt")
    free, limits = os.dup(0), resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(DataError, match="Too many open files") as caught:
            read_contents([file], tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.where == file.url


def test_an_address_is_said_once(web, cache):
    web.files["/a.txt"] = b"a"
    [file] = find(f"{web.url}/a.txt", cache)
    web.faults["/a.txt"] = [404] * 100
    with pytest.raises(DataError) as caught:
        identify(file, "text")
    assert caught.value.what == "cannot be read: HTTP 404, after 1 attempt"


def test_names_in_a_listing_lead_nowhere(web, cache, tmp_path):
    web.files = {"/data/../../up.txt": b"x", "/data/%2e%2e/up.txt": b"x", "/data/good.txt": b"good"}
    assert contents(find(f"{web.url}/data", cache)) == {"good.txt": b"good"}
    assert all(path.is_relative_to(cache.folder) for path in tmp_path.rglob("*.*"))
    web.files["/data/a%0a.txt"] = b"x"
    with pytest.raises(DataError, match="control characters"):
        find(f"{web.url}/data", cache)


def test_a_server_without_ranges(web, cache):
    web.ranges = False
    web.files = {"/a.txt": random.Random(2).randbytes(20 << 20)}
    [file] = find(f"{web.url}/a.txt", cache)
    with file.open() as opened:
        opened.seek(12 << 20)
        assert opened.read(100) == web.files["/a.txt"][12 << 20 :][:100]
    assert contents([file]) == {"a.txt": web.files["/a.txt"]}


class TestFaults:
    @pytest.fixture(params=["http", "s3"])
    def served(self, request):
        """A server, the path of a file there, and its address."""
        server = request.getfixturevalue("web" if request.param == "http" else "s3")
        path = "/corpus/a.txt"
        server.files[path] = FILES["deep/b.txt"]
        if request.param == "s3":
            server.put("a.txt", FILES["deep/b.txt"])
        return server, path, f"{server.url}/corpus/a.txt" if request.param == "http" else "s3://corpus/a.txt"

    @pytest.mark.parametrize(
        ("served", "fault"), [("http", Cut(0)), ("http", 429), ("s3", Cut(100_000)), ("s3", 503)], indirect=["served"]
    )
    def test_are_tried_again(self, served, cache, fault, caplog):
        server, path, address = served
        [file] = find(address, cache)
        server.faults[path] = [fault, fault]
        with caplog.at_level(logging.WARNING, "hfdist"):
            assert contents([file]) == {"a.txt": FILES["deep/b.txt"]}
        assert not server.faults[path]
        warnings = [record.getMessage() for record in caplog.records if record.name.startswith("hfdist")]
        assert 1 <= len(warnings) <= 2
        assert all(address in warning for warning in warnings)

    @pytest.mark.parametrize(
        ("served", "fault", "reason"),
        [("http", 503, "HTTP 503"), ("s3", Cut(1000), "PayloadError|IncompleteRead")],
        indirect=["served"],
    )
    def test_that_stay_are_said(self, served, cache, fault, reason):
        server, path, address = served
        [file] = find(address, cache)
        server.faults[path] = [fault] * 100
        with pytest.raises(DataError, match=reason) as caught, file.local():
            pass
        assert "after 4 attempts" in caught.value.what
        assert caught.value.where == address
        assert caught.value.hint
        assert caught.value.__cause__ is not None
        assert not list((cache.folder / "files").iterdir())
        server.faults[path] = [Cut(1000)] * 100
        with file.open() as opened, pytest.raises(OSError, match=r"a\.txt"):
            opened.read()

    @pytest.mark.parametrize("status", [403, 404])
    def test_that_do_not_pass_are_said_at_once(self, served, cache, status):
        server, path, address = served
        server.faults[path] = [status] * 100
        with pytest.raises(DataError, match=f"HTTP {status}, after 1 attempt") as caught:
            find(address, cache)
        assert (status == 403) == any(word in caught.value.hint for word in ("netrc", "AWS_ACCESS_KEY_ID"))

    def test_missing_credentials_are_said_at_once(self, s3, cache, monkeypatch, tmp_path):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with pytest.raises(DataError, match=r"NoCredentialsError.*after 1 attempt") as caught:
            find("s3://corpus/a.txt", cache)
        assert "AWS_PROFILE" in caught.value.hint

    def test_a_changed_file(self, served, cache):
        server, path, address = served
        [file] = find(address, cache)
        server.replace(path, b"other")
        if address.startswith("s3"):
            server.put("a.txt", b"other")
        for read in (file.local().__enter__, file.open, file.check_unchanged):
            with pytest.raises(DataError, match="has changed since the run began"):
                read()
        assert not list((cache.folder / "files").iterdir())

    def test_nobody_there(self, cache):
        with pytest.raises(DataError, match="after 4 attempts"):
            find("http://127.0.0.1:9/a.txt", cache)

    def test_a_folder_of_an_index_page_that_does_not_answer(self, web, cache):
        web.files = {"/data/a.txt": b"a", "/data/deep/b.txt": b"b"}
        web.faults["/data/deep"] = [503] * 2
        assert len(find(f"{web.url}/data", cache)) == 2
        web.faults["/data/deep"] = [503] * 100
        with pytest.raises(DataError, match="HTTP 503"):
            find(f"{web.url}/data", cache)


def test_retries_take_no_longer_than_they_may():
    calls = []

    def fail():
        calls.append(time.monotonic())
        raise ConnectionResetError("by the test")

    with pytest.raises(DataError, match=r"ConnectionResetError: by the test, after [23] attempts"):
        Retries(attempts=100, first_wait_seconds=0.1, total_seconds=0.2).run(fail, "http://h/a?sig=1")
    assert calls[-1] - calls[0] < 0.2


class TestAddresses:
    @pytest.mark.parametrize(
        "address",
        [
            "https://ann:pw1@host/a.txt",
            "https://pw1@host/a.txt",
            "https://host/a.txt?x=1&X-Amz-Signature=pw1",
            "https://host/a.txt?sig=pw1",
            "s3://ann:pw1@bucket/a.txt",
        ],
    )
    def test_secrets_are_refused_and_not_shown(self, cache, address):
        with pytest.raises(ConfigError, match="would be written") as caught:
            find(address, cache)
        assert "pw1" not in str(caught.value)
        assert "AWS_" in caught.value.hint

    def test_an_unknown_scheme_lists_the_others(self, cache):
        for address in ("ftp://host/a.txt", "simplecache::s3://bucket/a.txt"):
            with pytest.raises(ConfigError, match="s3://"):
                find(address, cache)

    def test_a_missing_package_is_named(self, cache):
        with pytest.raises(ConfigError, match="pip install gcsfs"):
            find("gs://bucket/a.txt", cache)

    def test_a_query_is_not_shown(self, web, cache, caplog):
        web.files["/a.txt"] = b"a"
        web.faults["/a.txt"] = [503] * 100
        with pytest.raises(DataError) as caught:
            find(f"{web.url}/a.txt?reader=hidden", cache)
        assert "hidden" not in str(caught.value) + caplog.text
        assert redact("https://u:p@h/a@b.txt?c#d") == "https://h/a@b.txt"
        assert redact("https://u:p/1?2@h/a@b.txt") == "https://h/a@b.txt"
        assert redact("https://h:80/a@b.txt") == "https://h:80/a@b.txt"
