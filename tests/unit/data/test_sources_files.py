"""Files that cannot be read are found when they are opened: the run stops, or goes on without them and says so."""

import gzip
import json
import logging
import os
import tracemalloc

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from datasets import Dataset, DatasetDict
from pyarrow import feather, ipc

from hfdist.config.data import BadRows, RowFormat, SourceConfig, SourceKind
from hfdist.data.sources import base, parquet_file, unpacked
from hfdist.data.sources.base import BadRow, ContentError
from hfdist.data.sources.dataset import DatasetShard, open_hub
from hfdist.data.sources.find import find_shards
from hfdist.data.sources.rows import RowReader
from hfdist.data.sources.text import MOST_DOCUMENT_BYTES
from hfdist.errors import ConfigError, DataError, ResourceError
from tests.unit.data.corpora import files_config, jsonl_bytes, open_shards, read_all, write_rows

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
def test_a_bad_file_stops_the_run_or_is_left_out(data, cache, name, caplog):
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


def test_columns_that_are_there_are_listed(data, cache):
    (data / "a.parquet").write_bytes(parquet_bytes(OTHER))
    with pytest.raises(ContentError) as caught:
        open_shards(str(data), cache)
    assert caught.value.allowed == "context, n"
    # Of the only file nothing would be left.
    assert caught.value.hint == "data.sources.files.text=context"


def test_no_good_file_at_all_stops_the_run_whatever_the_policy(data, cache):
    for name in ("a.jsonl", "b.jsonl"):
        (data / name).write_bytes(b"")
    with pytest.raises(DataError, match=r"(?s)no file of the source.*2 left out.*a\.jsonl: the file is empty"):
        open_shards(str(data), cache, on_bad_rows="skip")


class TestTheSameFileTwice:
    def test_the_second_is_the_bad_one(self, data, cache):
        for name in ("a.jsonl", "b.jsonl"):
            (data / name).write_bytes(jsonl_bytes())
        with pytest.raises(ContentError) as caught:
            open_shards(str(data), cache)
        assert caught.value.where == str(data / "b.jsonl")
        assert caught.value.found == str(data / "a.jsonl")
        assert [shard.name for shard in open_shards(str(data), cache, on_bad_rows="skip")] == ["a.jsonl"]

    def test_files_of_equal_ends_are_compared_whole(self, data, cache):
        end = b'{"text": "%s"}\n' % (b"e" * 70_000)
        for name, middle in (("a.jsonl", b"1"), ("b.jsonl", b"2")):
            (data / name).write_bytes(end + b'{"text": "%s"}\n' % middle + end)
        shards = open_shards(str(data), cache)
        assert shards[0].identity == shards[1].identity
        assert [shard.read([1]) for shard in shards] == [["1"], ["2"]]

    def test_documents_of_one_file_each_may_repeat(self, data, cache):
        for name in ("a.txt", "b.txt"):
            (data / name).write_text("the same")
        assert read_all(open_shards(str(data), cache)) == ["the same", "the same"]


class TestBombs:
    """A few kilobytes that want to become more than memory or disk holds."""

    @pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstandard.compress)])
    def test_unpacking_stops(self, data, cache, monkeypatch, suffix, compress):
        monkeypatch.setattr(unpacked, "_MOST_UNPACKED_BYTES", 2 << 20)
        monkeypatch.setattr(base, "_MOST_EXPANSION", 100)
        path = data / f"a.jsonl.{suffix}"
        path.write_bytes(compress(b'{"text": "' + b"a" * (64 << 20) + b'"}\n'))
        with pytest.raises(ContentError, match="expands beyond reason") as caught:
            open_shards(str(data), cache)
        unpacked_bytes = int(caught.value.found.split()[-1].replace(",", ""))
        assert unpacked_bytes <= max(2 << 20, 100 * path.stat().st_size) + (1 << 20)
        assert not unpacked_files(cache)

    def test_what_does_not_fit_stops_the_run_whatever_the_policy(self, data, cache):
        (data / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "%s"}\n' % (b"abc" * (1 << 19))))
        (shard,) = open_shards(str(data), cache, on_bad_rows="skip", file_cache_bytes=1 << 20)
        with pytest.raises(ResourceError, match=r"data\.file_cache_bytes=1572877 or more"):
            shard.read([0])

    def test_a_dictionary_of_one_value_that_stands_for_a_terabyte(self, data, cache):
        path = data / "a.parquet"
        value = "x" * (40 << 20)
        column = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), [value])
        pq.write_table(pa.table({"text": column}), path, compression="zstd", store_schema=False)
        assert path.stat().st_size < 4000
        (shard,) = open_shards(str(data), cache)
        peak_bytes = pa.default_memory_pool().max_memory()
        texts = shard.read(range(5000, 5000 + shard.rows_at_once))
        assert pa.default_memory_pool().max_memory() - peak_bytes < 10 * len(value)
        assert len(texts) == 1024
        assert texts[0] == value
        assert len({id(text) for text in texts}) <= 2

    def test_conversations_that_share_values_are_made_one_by_one(self, data, cache, monkeypatch):
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

    @pytest.mark.parametrize("of", ["nulls", "one letter"])
    def test_a_table_of_few_bytes_that_takes_much_memory(self, data, cache, monkeypatch, of):
        """A billion nulls are a few bytes in a file, and so is a page that is all one letter."""
        monkeypatch.setattr(parquet_file, "_MOST_DECODED_BYTES", 1 << 20)
        kind = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
        nulls = pa.array([[{"role": None, "content": None}] * 200_000], kind)
        table = pa.table({"messages": nulls} if of == "nulls" else {"text": ["x" * (4 << 20)]})
        pq.write_table(table, data / "a.parquet", compression="zstd", use_dictionary=False)
        assert (data / "a.parquet").stat().st_size < 4000
        with pytest.raises(ContentError, match="expands beyond reason"):
            open_shards(str(data), cache, format=RowFormat.messages if of == "nulls" else RowFormat.text)

    def test_one_line_without_end_is_indexed_in_pieces(self, data, cache):
        (data / "a.jsonl").write_bytes(b'{"text": "a"}\n' + b"x" * (65 << 20))
        first, second = read_all(open_shards(str(data), cache))
        assert first == "a"
        assert second.error.what == "the row is too large"


class TestIndex:
    """What a first start found, a second one does not look for again."""

    def test_a_damaged_one_is_made_anew(self, data, cache):
        """Else a wrong place would read as bad JSON, and good rows would be left out."""
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

    def test_a_damaged_refusal_is_made_anew(self, data, cache):
        (data / "a.jsonl").write_bytes(b'{"words": "a"}\n')
        for _ in range(2):
            with pytest.raises(ContentError, match="there is no column"):
                open_shards(str(data), cache)
            (refusal,) = (cache / "index").glob("*.json")
            refusal.write_bytes(refusal.read_bytes()[:-5])


class TestSavedDatasets:
    def test_a_saved_dataset_cannot_name_files_elsewhere(self, data):
        datasets.Dataset(TABLE).save_to_disk(str(data))
        state = json.loads((data / "state.json").read_text())
        state["_data_files"] = [{"filename": "../secret.arrow"}]
        (data / "state.json").write_text(json.dumps(state))
        with pytest.raises(ContentError, match="outside its folder"):
            open_hub("x", SourceConfig(kind=SourceKind.hub, path=str(data)))

    def test_a_split_that_is_not_there(self, data):
        datasets.DatasetDict({"a": datasets.Dataset(TABLE)}).save_to_disk(str(data))
        with pytest.raises(ConfigError, match="there is no split 'train', but a"):
            open_hub("x", SourceConfig(kind=SourceKind.hub, path=str(data)))


def shards_of(table, suffix, data, cache, **options):
    """A table as the only file, or as a dataset in memory."""
    if suffix == "dataset":
        return [DatasetShard("given", Dataset(table), RowReader())]
    write_rows(table, data / f"a.{suffix}", **options)
    return open_shards(str(data), cache)


def read_one(data, cache):
    """The rows of the only file."""
    return read_all(open_shards(str(data), cache))


BAD_LINES = [
    (b'{"text": null}', "holds no text", "null"),
    (b'{"text": 3}', "holds no text", "int: 3"),
    (b'{"txt": "a"}', "no column 'text'", None),
    (b'{"text": "cut', "not JSON", '{"text": "cut'),
    (b'{"text": "\xff\xfe"}', "not UTF-8", r"b'\xff'"),
    (b"[1, 2]", "not a JSON object", "[1, 2]"),
    (b"[" * 100_000, "not JSON", None),
    (b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit", None),
]


@pytest.mark.parametrize(("line", "what", "found"), BAD_LINES, ids=[case[1] for case in BAD_LINES])
def test_a_bad_line_names_file_row_and_byte(data, cache, line, what, found):
    (data / "rows.jsonl").write_bytes(b'{"text": "first"}\n\n' + line + b'\n{"text": "last"}')
    first, bad, last = read_one(data, cache)
    assert (first, last) == ("first", "last")
    assert isinstance(bad, BadRow)
    assert what in bad.error.what
    assert bad.error.where.startswith(f"{data}/rows.jsonl, row 1")
    if "column" not in what and "no text" not in what:
        assert f"byte {19 + max(line.find(0xFF), 0)} of the text" in bad.error.where
    if found is not None:
        assert found in str(bad.error)


def test_half_a_surrogate_pair_and_a_byte_order_mark_are_taken(data, cache):
    (data / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x\\ud800y"}\n \t\n{"text": ""}\n')
    assert read_one(data, cache) == ["x?y", ""]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl", "dataset"])
def test_null_and_a_row_that_is_too_large(data, cache, monkeypatch, suffix):
    monkeypatch.setattr(base, "MOST_ROW_BYTES", 100)
    table = pa.table({"text": ["a", None, "x" * 101, "z"]})
    first, null, large, last = read_all(shards_of(table, suffix, data, cache))
    assert (first, last) == ("a", "z")
    assert (null.error.what, null.error.found) == ("the text column holds no text", "null")
    assert large.error.what == "the row is too large"
    assert ", row 2" in large.error.where


@pytest.mark.parametrize("suffix", ["parquet", "feather", "dataset"])
def test_bytes_that_are_no_text_spoil_only_their_row(data, cache, suffix):
    table = pa.table({"text": pa.array([b"fine"] * 30 + [b"ab\xff\xfe", b"too"]).view(pa.string())})
    *fine, bad, last = read_all(shards_of(table, suffix, data, cache, most_rows=8))
    assert (fine, last) == (["fine"] * 30, "too")
    assert bad.error.what == "not UTF-8"
    assert ", row 30, byte 2 of the text" in bad.error.where


class TestDamage:
    """Bits that turn over in the middle of a file: found when they are read, if the format can tell."""

    def parquet(self, data):
        rows = [f"{n} " * 300 for n in range(300)]
        path = data / "a.parquet"
        pq.write_table(pa.table({"text": rows}), path, row_group_size=100, use_dictionary=False, compression="zstd")
        return rows, path

    def test_a_damaged_row_group_is_bad_and_the_others_are_not(self, data, cache):
        rows, path = self.parquet(data)
        start = pq.read_metadata(path).row_group(1).column(0).data_page_offset
        content = bytearray(path.read_bytes())
        content[start : start + 60] = bytes(60)
        path.write_bytes(content)
        texts = read_one(data, cache)
        assert texts[:100] + texts[200:] == rows[:100] + rows[200:]
        assert {text.error.where for text in texts[100:200]} == {f"{path}, row group 1"}
        assert texts[150].error.what.startswith("the file is damaged: ")

    def test_whether_a_row_is_bad_does_not_depend_on_what_is_read_with_it(self, data, cache):
        rows = [f"{n} " * 3000 for n in range(600)]
        path = data / "a.parquet"
        # Many pages in one row group, of which the last is damaged.
        pq.write_table(pa.table({"text": rows}), path, use_dictionary=False, data_page_size=1 << 17, write_batch_size=8)
        content = bytearray(path.read_bytes())
        end = pq.read_metadata(path).row_group(0).column(0)
        place = end.data_page_offset + end.total_compressed_size
        content[place - 300 : place] = bytes(300)
        path.write_bytes(content)
        (shard,) = open_shards(str(data), cache)
        together = shard.read(range(600))
        assert together[0] == rows[0]
        assert isinstance(together[-1], BadRow)
        alone = [shard.read([row])[0] for row in range(0, 600, 37)]
        assert [isinstance(text, BadRow) for text in alone] == [isinstance(t, BadRow) for t in together[::37]]

    @pytest.mark.parametrize("suffix", ["arrow", "feather"])
    def test_an_arrow_batch_whose_offsets_point_elsewhere(self, data, cache, suffix):
        path = data / f"a.{suffix}"
        write_rows(pa.table({"text": [f"text {n}" for n in range(30)]}), path, 10)
        content = path.read_bytes()
        offset = content.index((7).to_bytes(4, "little") + (14).to_bytes(4, "little"))
        path.write_bytes(content[:offset] + (1 << 30).to_bytes(4, "little") + content[offset + 4 :])
        texts = read_all(open_shards(str(data), cache))
        assert texts[:10] + texts[20:] == [f"text {n}" for n in [*range(10), *range(20, 30)]]
        assert {text.error.where for text in texts[10:20]} == {f"{path}, record batch 1"}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "txt"])
def test_a_file_that_changes_during_the_run_stops_it_whatever_the_policy(data, cache, kind):
    path = data / f"a.{kind}"
    if kind == "txt":
        path.write_text("row of text\n" * 50)
    else:
        write_rows(pa.table({"text": [f"row {n}" for n in range(50)]}), path)
    (shard,) = open_shards(str(data), cache, on_bad_rows="skip")
    assert isinstance(shard.read([0])[0], str)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=rf"(?s)has changed since the run began.*a\.{kind}"):
        shard.read([0])
    path.unlink()
    with pytest.raises(DataError, match=rf"(?s)cannot be read: No such file.*a\.{kind}"):
        shard.read([0])


class TestLongText:
    """Above a mebibyte a text file is several documents."""

    def test_the_parts_are_the_whole_and_end_with_lines(self, data, cache):
        line = "größer als zuvor, 12345\n"
        text = line * (2_500_000 // len(line)) + "no line end"
        (data / "long.txt").write_text(text, encoding="utf-8")
        (data / "short.txt").write_text("short")
        long, short = open_shards(str(data), cache)
        parts = long.read(range(long.runs[0]))
        assert "".join(parts) == text
        assert len(parts) == 3
        assert all(part.endswith("\n") and len(part.encode()) <= MOST_DOCUMENT_BYTES for part in parts[:-1])
        assert long.read([2, 0]) == [parts[2], parts[0]]
        assert short.read([0]) == ["short"]

    def test_without_line_ends_no_character_is_cut(self, data, cache):
        text = "a" + "€" * 800_000
        (data / "long.txt").write_text(text, encoding="utf-8")
        parts = read_one(data, cache)
        assert "".join(parts) == text
        assert len(parts) == 3

    def test_a_bad_byte_spoils_only_its_part(self, data, cache):
        (data / "long.txt").write_bytes(b"good\n" * 300_000 + b"\xff\n")
        good, bad = read_one(data, cache)
        assert good.startswith("good")
        assert bad.error.where.endswith("row 1, byte 1500000 of the text")


def test_linked_folders_are_read_once_wherever_they_lead(tmp_path):
    """A folder elsewhere, under two names; one here again; and two that lead back, which have no end."""
    tree, away = tmp_path / "[tree]", tmp_path / "away"
    for path in (tree / "own" / "a.jsonl", away / "deep" / "b.jsonl", away / ".old" / "c.jsonl"):
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"text": path.name}))
    links = {
        "again": tree / "own", "back": tree, "linked": away, "more": away / "deep", "own/up": tree, "gone": "nowhere",
    }  # fmt: skip
    for name, target in links.items():
        (tree / name).symlink_to(target, target_is_directory=True)
    for path in (tree, f"{tmp_path}/[[]tree]/**/*.jsonl", f"{tmp_path}/**/own/**"):
        shards = find_shards("files", files_config(str(path), tmp_path), tmp_path / "cache")
        assert sorted(shard.name.rpartition("/")[2] for shard in shards) == ["a.jsonl", "b.jsonl"], path


def test_a_folder_of_splits_is_refused_with_one_of_them(tmp_path):
    rows = Dataset.from_list([{"text": "a"}])
    DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match="several splits") as caught:
        open_shards(str(tmp_path / "saved"), tmp_path / "cache")
    assert caught.value.hint.endswith("saved/train")
    assert open_shards(str(tmp_path / "saved" / "train"), tmp_path / "cache")


def test_hints_are_those_of_the_source_that_asks_at_each_start(data, cache):
    for name, column in (("a", "content"), ("b", "body")):
        (data / f"{name}.jsonl").write_text(f'{{"{column}": "text"}}\n')
    config = files_config(str(data), cache)
    for name in ("files", "files", "other"):
        config.sources = {name: next(iter(config.sources.values()))}
        with pytest.raises(ContentError) as caught:
            find_shards(name, config, cache)
        assert caught.value.hint.startswith(f"'data.sources.{name}.text=[content,body]'")


def test_unpacked_copies_of_like_files_in_two_folders_are_two(tmp_path, cache, monkeypatch):
    """Of one relative path, size and time, as files out of an archive may be."""
    for word in ("first", "other"):
        path = tmp_path / word / "data" / "a.jsonl.gz"
        path.parent.mkdir(parents=True)
        path.write_bytes(gzip.compress(f'{{"text": "{word}"}}\n'.encode(), mtime=0))
        os.utime(path, (1, 1))
        monkeypatch.chdir(tmp_path / word)
        assert read_all(open_shards("data", cache)) == [word]


def test_a_folder_of_data_files_in_the_home_folder(data, cache, monkeypatch):
    monkeypatch.setenv("HOME", str(data))
    (data / "rows").mkdir()
    (data / "rows" / "train.jsonl").write_text('{"text": "a"}\n')
    config = SourceConfig(kind=SourceKind.hub, path="~/rows")
    assert open_hub("x", config, cache_dir=cache).read([0]) == ["a"]
