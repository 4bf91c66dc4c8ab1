"""Files that cannot be read are found when they are opened: the run stops, or goes on without them and says so."""

import gzip
import json
import logging
import os
import shutil
import tracemalloc
from collections import namedtuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pyarrow import feather, ipc

from hfdist.config.data import BadRows, RowFormat, SourceConfig, SourceKind
from hfdist.data.sources import base
from hfdist.data.sources.base import ContentError
from hfdist.data.sources.dataset import open_hub
from hfdist.data.sources.find import find_shards
from hfdist.errors import ConfigError, DataError, ResourceError
from tests.unit.data.corpora import files_config, jsonl_bytes, open_shards, read_all

TABLE = pa.table({"text": [f"row {n} of a table" for n in range(60)]})


def unpacked_files(cache):
    """Whole ones and what was begun."""
    return list(cache.glob("files/*"))


def stream_bytes(table=TABLE):
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    return sink.getvalue().to_pybytes()


def parquet_bytes(table=TABLE):
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def feather_bytes():
    sink = pa.BufferOutputStream()
    feather.write_feather(TABLE, sink)
    return sink.getvalue().to_pybytes()


def without_last_batch():
    """A stream that is cut exactly between two batches, and so looks like a shorter one."""
    whole, shorter = stream_bytes(), stream_bytes(TABLE[:40])
    return whole[: len(shorter) - 8]


OTHER = pa.table({"context": ["a", "b"], "n": [1, 2]})
NUMBERS = pa.table({"text": [1, 2, 3]})
# name -> (content, part of the message)
BAD_FILES = {
    "empty.jsonl": (b"", "is empty"),
    "empty.txt": (b"", "is empty"),
    "blank.jsonl": (b"\n \n", "no rows"),
    "no_rows.parquet": (parquet_bytes(TABLE[:0]), "no rows"),
    "no_rows.arrow": (stream_bytes(TABLE[:0]), "no rows"),
    "cut.parquet": (parquet_bytes()[:-100], "not a whole parquet file"),
    "other.parquet": (b"something else entirely", "not a whole parquet file"),
    "cut.arrow": (stream_bytes()[:-500], "not a whole arrow file"),
    "shorter.arrow": (without_last_batch(), "ends before its end mark"),
    "other.arrow": (b"something else entirely", "not a whole arrow file"),
    "cut.feather": (feather_bytes()[:600], "not a whole arrow file"),
    "cut.jsonl.gz": (gzip.compress(jsonl_bytes())[:-200], "damaged or cut off"),
    "crc.jsonl.gz": (gzip.compress(jsonl_bytes())[:-8] + bytes(8), "damaged or cut off"),
    "cut.jsonl.zst": (zstandard.compress(jsonl_bytes())[:-3], "damaged or cut off"),
    "other.jsonl.gz": (b"something else entirely", "damaged or cut off"),
    "column.parquet": (parquet_bytes(OTHER), "no column 'text'"),
    "column.arrow": (stream_bytes(OTHER), "no column 'text'"),
    "column.jsonl": (b'{"context": "a"}\n{"context": "b"}\n', "no column 'text'"),
    "type.parquet": (parquet_bytes(NUMBERS), "holds no text"),
    "type.arrow": (stream_bytes(NUMBERS), "holds no text"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_stops_the_run_or_is_left_out(folders, name, caplog):
    data, cache = folders
    content, reason = BAD_FILES[name]
    (data / name).write_bytes(content)
    (data / "good.jsonl").write_bytes(jsonl_bytes())
    for _ in range(2):  # once more from the cache
        with pytest.raises(ContentError) as caught:
            open_shards(str(data), cache)
        assert reason in caught.value.what
        assert name in caught.value.where
        assert "data.on_bad_rows=skip" in caught.value.hint

    config = files_config(str(data), cache, on_bad_rows=BadRows.skip)
    with caplog.at_level(logging.WARNING):
        shards = find_shards("files", config, cache)
    assert [shard.name for shard in shards] == ["good.jsonl"]
    assert [record.getMessage() for record in caplog.records] == [f"{data / name} is left out: {caught.value.what}"]
    assert not unpacked_files(cache)


def test_columns_that_are_there_are_listed(folders):
    data, cache = folders
    (data / "a.parquet").write_bytes(parquet_bytes(OTHER))
    with pytest.raises(ContentError) as caught:
        open_shards(str(data), cache)
    assert caught.value.allowed == "context, n"
    assert caught.value.hint.startswith("data.sources.files.text=context, or ")


def test_no_good_file_at_all_stops_the_run_whatever_the_policy(folders):
    data, cache = folders
    for name in ("a.jsonl", "b.jsonl"):
        (data / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"(?s)no file of the source.*2 left out.*a\.jsonl: the file is empty"):
        open_shards(str(data), cache, on_bad_rows="skip")


class TestTheSameFileTwice:
    def test_the_second_is_the_bad_one(self, folders):
        data, cache = folders
        for name in ("a.jsonl", "b.jsonl"):
            (data / name).write_bytes(jsonl_bytes())
        with pytest.raises(ContentError) as caught:
            open_shards(str(data), cache)
        assert caught.value.where == str(data / "b.jsonl")
        assert caught.value.found == str(data / "a.jsonl")
        assert [shard.name for shard in open_shards(str(data), cache, on_bad_rows="skip")] == ["a.jsonl"]

    def test_files_of_equal_ends_are_compared_whole(self, folders):
        data, cache = folders
        end = b'{"text": "%s"}\n' % (b"e" * 70_000)
        for name, middle in (("a.jsonl", b"1"), ("b.jsonl", b"2")):
            (data / name).write_bytes(end + b'{"text": "%s"}\n' % middle + end)
        shards = open_shards(str(data), cache)
        assert shards[0].identity == shards[1].identity
        assert [shard.read([1]) for shard in shards] == [["1"], ["2"]]

    def test_documents_of_one_file_each_may_repeat(self, folders):
        data, cache = folders
        for name in ("a.txt", "b.txt"):
            (data / name).write_text("the same")
        assert read_all(open_shards(str(data), cache)) == ["the same", "the same"]


def messages_type():
    return pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


class TestBombs:
    """A few kilobytes that want to become more than memory or disk holds."""

    @pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstandard.compress)])
    def test_unpacking_stops(self, folders, monkeypatch, suffix, compress):
        data, cache = folders
        monkeypatch.setattr(base, "_LEAST_BOMB_BYTES", 2 << 20)
        monkeypatch.setattr(base, "_MOST_EXPANSION", 100)
        path = data / f"a.jsonl.{suffix}"
        path.write_bytes(compress(b'{"text": "' + b"a" * (64 << 20) + b'"}\n'))
        with pytest.raises(ContentError, match="expands beyond reason") as caught:
            open_shards(str(data), cache)
        unpacked_bytes = int(caught.value.found.split()[-1].replace(",", ""))
        assert unpacked_bytes <= max(2 << 20, 100 * path.stat().st_size) + (1 << 20)
        assert not unpacked_files(cache)

    def test_what_does_not_fit_stops_the_run_whatever_the_policy(self, folders):
        data, cache = folders
        (data / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "%s"}\n' % (b"abc" * (1 << 19))))
        (shard,) = open_shards(str(data), cache, on_bad_rows="skip", file_cache_bytes=1 << 20)
        with pytest.raises(ResourceError, match=r"data\.file_cache_bytes=1572877 or more"):
            shard.read([0])

    def test_a_full_disk_stops_the_run_whatever_the_policy(self, folders, monkeypatch):
        data, cache = folders
        (data / "a.jsonl.gz").write_bytes(gzip.compress(jsonl_bytes()))
        usage = namedtuple("usage", ("total", "used", "free"))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 0, 100))
        (shard,) = open_shards(str(data), cache, on_bad_rows="skip")
        with pytest.raises(ResourceError, match=r"(?s)no space on the disk.*100 free.*data\.cache_dir"):
            shard.read([0])
        assert not unpacked_files(cache)

    def test_a_dictionary_of_one_value_that_stands_for_a_terabyte(self, folders):
        data, cache = folders
        path = data / "a.parquet"
        value = "x" * (10 << 20)
        column = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), [value])
        pq.write_table(pa.table({"text": column}), path, compression="zstd", store_schema=False)
        assert path.stat().st_size < 2000
        (shard,) = open_shards(str(data), cache)
        peak_bytes = pa.default_memory_pool().max_memory()
        texts = shard.read(range(5000, 5000 + shard.rows_at_once))
        assert pa.default_memory_pool().max_memory() - peak_bytes < 100 << 20
        assert len(texts) == 1024
        assert texts[0] == value
        assert len({id(text) for text in texts}) <= 2

    def test_conversations_that_share_values_are_made_one_by_one(self, folders, monkeypatch):
        data, cache = folders
        monkeypatch.setattr(base, "MOST_ROW_BYTES", 4 << 20)
        value, num_rows = "x" * (1 << 18), 200
        shared = pa.DictionaryArray.from_arrays(pa.array([0] * num_rows, pa.int32()), [value])
        table = pa.table({"prompt": [str(n) for n in range(num_rows)], "completion": shared})
        pq.write_table(table, data / "a.parquet", compression="zstd", store_schema=False)
        nested = {"role": ["user", "assistant"] * 100, "content": ["hi", value] * 100}
        messages = pa.StructArray.from_arrays([pa.array(column) for column in nested.values()], list(nested))
        lists = pa.ListArray.from_arrays(pa.array(range(0, 201, 2), pa.int32()), messages)
        bomb = pa.ListArray.from_arrays(pa.array([0, 2, 200], pa.int32()), messages)
        for name, rows in (("b", lists), ("c", bomb)):
            pq.write_table(pa.table({"messages": rows}), data / f"{name}.parquet", compression="zstd")
        assert all(path.stat().st_size < 20_000 for path in data.iterdir())
        del messages, lists, bomb, nested
        tracemalloc.start()
        a, b, c = open_shards(str(data), cache, format=RowFormat.auto)
        for shard in (a, b):
            lengths = [len(text) for text in shard.read(range(min(shard.rows_at_once, shard.runs[0])))]
            assert sum(lengths) > len(lengths) * len(value) > 2 << 20
        good, bad = c.read([0, 1])
        assert json.loads(good)["messages"][1]["content"] == value
        assert bad.error.what == "the row is too large"
        assert "row 1" in bad.error.where
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 10 << 20

    def test_values_that_are_nothing_count(self, folders, monkeypatch):
        """A billion nulls are a few bytes in a file."""
        data, cache = folders
        monkeypatch.setattr(base, "_LEAST_BOMB_BYTES", 1 << 20)
        nothing = pa.array([[{"role": None, "content": None}] * 200_000], messages_type())
        pq.write_table(pa.table({"messages": nothing}), data / "a.parquet", compression="zstd")
        assert (data / "a.parquet").stat().st_size < 2000
        with pytest.raises(ContentError, match="expands beyond reason"):
            open_shards(str(data), cache, format=RowFormat.messages)

    def test_a_page_that_is_all_one_letter(self, folders, monkeypatch):
        data, cache = folders
        monkeypatch.setattr(base, "_LEAST_BOMB_BYTES", 1 << 20)
        table = pa.table({"text": ["x" * (4 << 20)]})
        pq.write_table(table, data / "a.parquet", compression="zstd", use_dictionary=False)
        with pytest.raises(ContentError, match="expands beyond reason"):
            open_shards(str(data), cache)

    def test_one_line_without_end_is_indexed_in_pieces(self, folders):
        data, cache = folders
        (data / "a.jsonl").write_bytes(b'{"text": "a"}\n' + b"x" * (65 << 20))
        first, second = read_all(open_shards(str(data), cache))
        assert first == "a"
        assert second.error.what == "the row is too large"


class TestIndex:
    """What a first start found, a second one does not look for again."""

    @pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.arrow"])
    def test_a_second_start_does_not_read_the_file(self, folders, name):
        data, cache = folders
        path = data / name
        content = {"a.arrow": stream_bytes(), "a.jsonl": jsonl_bytes(), "a.jsonl.gz": gzip.compress(jsonl_bytes())}
        path.write_bytes(content[name])
        (shard,) = open_shards(str(data), cache)
        entries = {entry: entry.stat().st_mtime_ns for entry in cache.rglob("*") if entry.is_file()}
        assert any(entry.suffix == ".npy" for entry in entries)
        (again,) = open_shards(str(data), cache)
        assert again.runs == shard.runs
        assert {entry: entry.stat().st_mtime_ns for entry in cache.rglob("*") if entry.is_file()} == entries

    def test_a_damaged_one_is_made_anew(self, folders):
        """Else a wrong place would read as bad JSON, and good rows would be left out."""
        data, cache = folders
        (data / "a.jsonl").write_bytes(jsonl_bytes())
        rows = read_all(open_shards(str(data), cache))
        (index,) = (cache / "index").glob("*.npy")
        whole = index.read_bytes()
        for place in (len(whole) // 2, len(whole) - 1):
            damaged = bytearray(whole)
            damaged[place] ^= 4
            index.write_bytes(damaged)
            assert read_all(open_shards(str(data), cache, on_bad_rows="skip")) == rows
            assert index.read_bytes() == whole
        index.write_bytes(whole[:-16])
        assert read_all(open_shards(str(data), cache, on_bad_rows="skip")) == rows

    def test_a_damaged_refusal_is_made_anew(self, folders):
        data, cache = folders
        (data / "a.jsonl").write_bytes(b'{"words": "a"}\n')
        for _ in range(2):
            with pytest.raises(ContentError, match="there is no column"):
                open_shards(str(data), cache)
            (refusal,) = (cache / "index").glob("*.json")
            refusal.write_bytes(refusal.read_bytes()[:-5])

    def test_a_change_in_the_middle_is_seen_by_the_time_of_the_file(self, folders):
        data, cache = folders
        path = data / "a.jsonl"
        end = b'{"text": "%s"}\n' % (b"e" * 70_000)
        path.write_bytes(end + b'{"text": "one line"}\n' + end)
        assert len(read_all(open_shards(str(data), cache))) == 3
        path.write_bytes(end + b'{"text": "a"}\n\n\n\n\n\n\n\n' + end)
        os.utime(path, (1, 1))
        assert read_all(open_shards(str(data), cache))[1] == "a"


class TestSavedDatasets:
    def test_a_saved_dataset_cannot_name_files_elsewhere(self, folders):
        import datasets

        data, _ = folders
        datasets.Dataset(TABLE).save_to_disk(str(data))
        state = json.loads((data / "state.json").read_text())
        state["_data_files"] = [{"filename": "../secret.arrow"}]
        (data / "state.json").write_text(json.dumps(state))
        with pytest.raises(ContentError, match="outside its folder"):
            open_hub("x", SourceConfig(kind=SourceKind.hub, path=str(data)))

    def test_a_split_that_is_not_there(self, folders):
        import datasets

        data, _ = folders
        datasets.DatasetDict({"a": datasets.Dataset(TABLE)}).save_to_disk(str(data))
        with pytest.raises(ConfigError, match="there is no split 'train', but a"):
            open_hub("x", SourceConfig(kind=SourceKind.hub, path=str(data)))
