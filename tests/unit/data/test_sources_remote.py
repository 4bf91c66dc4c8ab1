"""Shards behind a network: the same documents, and no more of a file than is needed, when it is needed."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hfdist.data.sources.base import ContentError
from hfdist.data.sources.find import SUFFIXES
from hfdist.data.sources.rows import RowReader
from hfdist.data.sources.tables import ParquetShard
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.find import find_files
from hfdist.errors import DataError
from tests.unit.data.corpora import WRITERS, open_shards, read_all, texts
from tests.unit.data.servers import Slow


def serve(web, folder):
    """Put the files of a folder behind the server; give the URL of theirs."""
    web.files |= {f"/texts/{path.name}": path.read_bytes() for path in folder.iterdir()}
    return f"{web.url}/texts/"


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_gives_the_same_documents_and_asks_for_no_content_at_a_second_start(web, folders, kind):
    data, cache = folders
    WRITERS[kind](data)
    local = open_shards(str(data), cache)
    url = serve(web, data)
    shards = open_shards(url, cache)
    assert [shard.identity for shard in shards] == [shard.identity for shard in local]
    assert read_all(shards) == list(texts())
    if kind == "parquet":
        # Its footer is not kept, because it takes one request.
        return
    web.requests.clear()
    again = open_shards(url, cache)
    assert {path for method, path, _ in web.requests if method == "GET"} == {"/texts/"}
    assert read_all(again) == list(texts())


def test_of_a_table_only_its_ends_are_read_until_a_row_is_asked_for(web, folders):
    data, cache = folders
    rows = [f"{n} {hash(n * 7919)} " * 40 for n in range(20_000)]
    pq.write_table(pa.table({"text": rows}), data / "a.parquet", compression="none")
    num_bytes = (data / "a.parquet").stat().st_size
    (shard,) = open_shards(serve(web, data), cache)
    ranges = [asked.removeprefix("bytes=").split("-") for _, _, asked in web.requests if asked]
    assert num_bytes > 2_000_000
    assert sum(int(last) - int(first) + 1 for first, last in ranges) < 400_000
    assert not list(cache.glob("files/*"))
    assert shard.read([19_999, 3]) == [rows[19_999], rows[3]]
    assert len(list(cache.glob("files/*"))) == 1


def test_a_file_that_cannot_be_reached_is_no_bad_file(web, folders):
    data, cache = folders
    pq.write_table(pa.table({"text": ["a"]}), data / "a.parquet")
    (file,) = find_files(serve(web, data), key="x", suffixes=SUFFIXES, cache=FileCache(cache, 1 << 30))
    # The first question is whether it has changed, the second is for its footer.
    web.faults[f"/texts/{file.name}"] = [Slow(0), 403]
    with pytest.raises(DataError, match="403") as caught:
        ParquetShard(file, "identity", RowReader("text"))
    assert not isinstance(caught.value, ContentError)


def test_a_file_that_changes_before_it_is_fetched_stops_the_run_and_later_does_not_matter(web, folders):
    data, cache = folders
    for name in ("a", "b"):
        pq.write_table(pa.table({"text": [name]}), data / f"{name}.parquet")
    fetched, other = open_shards(serve(web, data), cache, on_bad_rows="skip")
    assert fetched.read([0]) == ["a"]
    for name in ("a", "b"):
        web.replace(f"/texts/{name}.parquet", web.files[f"/texts/{name}.parquet"][:-1] + b"2")
    assert fetched.read([0]) == ["a"]
    with pytest.raises(DataError, match=r"(?s)has changed since the run began.*b\.parquet"):
        other.read([0])
