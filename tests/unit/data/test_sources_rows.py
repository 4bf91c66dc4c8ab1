"""Rows that cannot be read are values that say why; the others of their file are as they were."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from pyarrow import ipc

from hfdist.data.sources import base
from hfdist.data.sources.base import BadRow
from hfdist.data.sources.dataset import DatasetShard
from hfdist.data.sources.rows import RowReader
from hfdist.data.sources.text import MOST_DOCUMENT_BYTES
from hfdist.errors import DataError
from tests.unit.data.corpora import open_shards, read_all


def shards_of(table, suffix, folders, **options):
    """A table as the only file, or as a dataset in memory."""
    data, cache = folders
    if suffix == "dataset":
        return [DatasetShard("given", Dataset(table), RowReader("text"))]
    write_table(table, data / f"a.{suffix}", **options)
    return open_shards(str(data), cache)


def write_table(table, path, *, max_chunksize=None):
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix in (".arrow", ".feather"):
        with (ipc.new_stream if path.suffix == ".arrow" else ipc.new_file)(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=max_chunksize)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


def read_one(folders):
    """The rows of the only file."""
    data, cache = folders
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
def test_a_bad_line_names_file_row_and_byte(folders, line, what, found):
    (folders[0] / "rows.jsonl").write_bytes(b'{"text": "first"}\n\n' + line + b'\n{"text": "last"}')
    first, bad, last = read_one(folders)
    assert (first, last) == ("first", "last")
    assert isinstance(bad, BadRow)
    assert what in bad.error.what
    assert bad.error.where.startswith(f"{folders[0]}/rows.jsonl, row 1")
    if "column" not in what and "no text" not in what:
        assert f"byte {19 + max(line.find(0xFF), 0)} of the text" in bad.error.where
    if found is not None:
        assert found in str(bad.error)


def test_half_a_surrogate_pair_and_a_byte_order_mark_are_taken(folders):
    (folders[0] / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "x\\ud800y"}\n \t\n{"text": ""}\n')
    assert read_one(folders) == ["x?y", ""]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl", "dataset"])
def test_null_and_a_row_that_is_too_large(folders, monkeypatch, suffix):
    monkeypatch.setattr(base, "MOST_ROW_BYTES", 100)
    table = pa.table({"text": ["a", None, "x" * 101, "z"]})
    first, null, large, last = read_all(shards_of(table, suffix, folders))
    assert (first, last) == ("a", "z")
    assert (null.error.what, null.error.found) == ("the text column holds no text", "null")
    assert large.error.what == "the row is too large"
    assert ", row 2" in large.error.where


@pytest.mark.parametrize("suffix", ["parquet", "feather", "dataset"])
def test_bytes_that_are_no_text_spoil_only_their_row(folders, suffix):
    table = pa.table({"text": pa.array([b"fine"] * 30 + [b"ab\xff\xfe", b"too"]).view(pa.string())})
    *fine, bad, last = read_all(shards_of(table, suffix, folders, max_chunksize=8))
    assert (fine, last) == (["fine"] * 30, "too")
    assert bad.error.what == "not UTF-8"
    assert ", row 30, byte 2 of the text" in bad.error.where


class TestDamage:
    """Bits that turn over in the middle of a file: found when they are read, if the format can tell."""

    def parquet(self, folders):
        rows = [f"{n} " * 300 for n in range(300)]
        path = folders[0] / "a.parquet"
        pq.write_table(pa.table({"text": rows}), path, row_group_size=100, use_dictionary=False, compression="zstd")
        return rows, path

    def test_a_damaged_row_group_is_bad_and_the_others_are_not(self, folders):
        rows, path = self.parquet(folders)
        start = pq.read_metadata(path).row_group(1).column(0).data_page_offset
        content = bytearray(path.read_bytes())
        content[start : start + 60] = bytes(60)
        path.write_bytes(content)
        texts = read_one(folders)
        assert texts[:100] + texts[200:] == rows[:100] + rows[200:]
        assert {text.error.where for text in texts[100:200]} == {f"{path}, row group 1"}
        assert texts[150].error.what.startswith("the file is damaged: ")

    def test_whether_a_row_is_bad_does_not_depend_on_what_is_read_with_it(self, folders):
        rows = [f"{n} " * 3000 for n in range(600)]
        path = folders[0] / "a.parquet"
        # Many pages in one row group, of which the last is damaged.
        pq.write_table(pa.table({"text": rows}), path, use_dictionary=False, data_page_size=1 << 17, write_batch_size=8)
        content = bytearray(path.read_bytes())
        end = pq.read_metadata(path).row_group(0).column(0)
        place = end.data_page_offset + end.total_compressed_size
        content[place - 300 : place] = bytes(300)
        path.write_bytes(content)
        (shard,) = open_shards(str(folders[0]), folders[1])
        together = shard.read(range(600))
        assert together[0] == rows[0]
        assert isinstance(together[-1], BadRow)
        alone = [shard.read([row])[0] for row in range(0, 600, 37)]
        assert [isinstance(text, BadRow) for text in alone] == [isinstance(t, BadRow) for t in together[::37]]

    @pytest.mark.parametrize("suffix", ["arrow", "feather"])
    def test_an_arrow_batch_whose_offsets_point_elsewhere(self, folders, suffix):
        data, cache = folders
        path = data / f"a.{suffix}"
        write_table(pa.table({"text": [f"text {n}" for n in range(30)]}), path, max_chunksize=10)
        content = path.read_bytes()
        offset = content.index((7).to_bytes(4, "little") + (14).to_bytes(4, "little"))
        path.write_bytes(content[:offset] + (1 << 30).to_bytes(4, "little") + content[offset + 4 :])
        texts = read_all(open_shards(str(data), cache))
        assert texts[:10] + texts[20:] == [f"text {n}" for n in [*range(10), *range(20, 30)]]
        assert {text.error.where for text in texts[10:20]} == {f"{path}, record batch 1"}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "txt"])
def test_a_file_that_changes_during_the_run_stops_it_whatever_the_policy(folders, kind):
    data, cache = folders
    path = data / f"a.{kind}"
    write_table(pa.table({"text": [f"row {n}" for n in range(50)]}), path)
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

    def test_the_parts_are_the_whole_and_end_with_lines(self, folders):
        data, cache = folders
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

    def test_without_line_ends_no_character_is_cut(self, folders):
        data, _ = folders
        text = "a" + "€" * 800_000
        (data / "long.txt").write_text(text, encoding="utf-8")
        parts = read_one(folders)
        assert "".join(parts) == text
        assert len(parts) == 3

    def test_a_bad_byte_spoils_only_its_part(self, folders):
        data, _ = folders
        (data / "long.txt").write_bytes(b"good\n" * 300_000 + b"\xff\n")
        good, bad = read_one(folders)
        assert good.startswith("good")
        assert bad.error.where.endswith("row 1, byte 1500000 of the text")
