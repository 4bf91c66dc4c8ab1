"""Reading neighbours together: the same texts in the same order, within a bound of memory, whatever the files."""

import gzip
import multiprocessing
import os
import shutil
import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from hfdist.config.data import DataConfig, SourceConfig, SourceKind
from hfdist.data import TokenStream, open_corpus
from hfdist.data.order import LaneOrder, block_sizes
from hfdist.data.sources import parquet
from hfdist.data.tokenize import encode, tokenizer_digest
from hfdist.errors import CheckpointError, DataError, ResourceError
from tests.unit.data.corpora import files_config, jsonl_bytes, texts, tokenizer, write_parquet, write_txt


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data", tmp_path / "cache"


@given(
    runs=st.lists(st.integers(1, 400), min_size=1, max_size=8), lanes=st.integers(1, 6), position=st.integers(0, 200)
)
@settings(max_examples=60, deadline=None)
def test_neighbours_are_the_next_documents_of_the_lane_and_lie_in_one_run(runs, lanes, position):
    order = LaneOrder(block_sizes(runs, lanes=lanes), lanes=lanes, seed=5)
    if position >= order.lane_length(1, 0):
        return
    together = order.neighbours(1, 0, position)
    assert together == [order.document(1, 0, position + step) for step in range(len(together))]
    ends = np.cumsum(runs)
    assert len(set(np.searchsorted(ends, together, side="right").tolist())) == 1


def numbered(folder, num_rows, *, row_group_size, size=1):
    """A parquet file whose row n is the text `n.` repeated."""
    rows = [f"{n}." * size for n in range(num_rows)]
    pq.write_table(pa.table({"text": rows}), folder / "a.parquet", row_group_size=row_group_size)
    return rows


def test_rows_of_a_large_row_group_come_in_the_order_asked_for(folders):
    data, cache = folders
    rows = numbered(data, 7000, row_group_size=5000)
    corpus = open_corpus(files_config(str(data), cache))
    for asked in ([4999, 0, 1023, 1024, 3000], [2], [6999, 5000, 6000], [1025, 1024]):
        assert corpus.texts(asked) == [rows[n] for n in asked]


def test_long_rows_are_read_in_portions_and_short_ones_by_the_thousand(folders):
    data, cache = folders
    rows = numbered(data, 200, row_group_size=200, size=100_000)
    corpus = open_corpus(files_config(str(data), cache))
    portion = corpus.texts(range(200))
    assert 1 <= len(portion) < 200
    assert portion == rows[: len(portion)]
    # The estimate is of the file's mean row, so allow for the spread around it.
    assert sum(map(len, portion)) < 2 * parquet._HELD_BYTES

    numbered(data, 3000, row_group_size=3000)
    assert len(open_corpus(files_config(str(data), cache)).texts(range(3000))) == parquet._MOST_ROWS


def test_a_lane_decodes_a_row_group_about_once_a_block(folders, monkeypatch):
    data, cache = folders
    numbered(data, 4000, row_group_size=4000)
    config = files_config(str(data), cache, lanes=4)
    stream = TokenStream(open_corpus(config), tokenizer(), config)
    decodes = []
    decode = parquet.ParquetShard._decode
    monkeypatch.setattr(
        parquet.ParquetShard, "_decode", lambda *args, **named: decodes.append(1) or decode(*args, **named)
    )
    sequences = iter(stream)
    while stream.state_dict()["places"][0][2] < 300:
        next(sequences)
    # 4 lanes, 300 documents each, in blocks of 4000 // (4 * 16) = 62 rows.
    assert len(decodes) <= 4 * 6


def test_every_document_is_mixed_in_once_whatever_the_lanes(folders):
    data, cache = folders
    rows = numbered(data, 5000, row_group_size=900)
    mixed = list(open_corpus(files_config(str(data), cache)).mixed())
    assert sorted(mixed) == sorted(rows)
    assert mixed == list(open_corpus(files_config(str(data), cache, lanes=3)).mixed())
    moved = [abs(rows.index(text) - place) for place, text in enumerate(mixed[:200])]
    assert np.mean(moved) > 1000


def test_a_parquet_text_that_is_not_utf8_is_named(folders):
    data, cache = folders
    column = pa.array([b"fine"] * 30 + [b"\xff\xfe"]).view(pa.string())
    pq.write_table(pa.table({"text": column}), data / "a.parquet")
    corpus = open_corpus(files_config(str(data), cache))
    assert corpus.text(29) == "fine"
    with pytest.raises(DataError, match=r"(?s)not UTF-8.*a\.parquet, row 30"):
        corpus.text(30)


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstandard.compress)])
class TestCompressed:
    def test_parts_one_behind_the_other_are_all_read(self, folders, suffix, compress):
        data, cache = folders
        raw = jsonl_bytes()
        middle = raw.index(b"\n", len(raw) // 2) + 1
        (data / f"rows.jsonl.{suffix}").write_bytes(compress(raw[:middle]) + compress(raw[middle:]))
        corpus = open_corpus(files_config(str(data), cache))
        assert [corpus.text(n) for n in range(corpus.num_documents)] == list(texts())

    @pytest.mark.parametrize("missing_bytes", [3, 200, 5000])
    def test_a_cut_file_is_refused_and_not_taken_for_a_short_one(self, folders, suffix, compress, missing_bytes):
        data, cache = folders
        (data / f"rows.jsonl.{suffix}").write_bytes(compress(jsonl_bytes())[:-missing_bytes])
        with pytest.raises(DataError, match=rf"(?s)damaged or cut off.*rows\.jsonl\.{suffix}"):
            open_corpus(files_config(str(data), cache))
        assert not list((cache / "jsonl").glob("*.jsonl"))


def test_folders_named_like_files_are_searched_and_hidden_ones_are_not(folders):
    data, cache = folders
    (data / "rows.parquet").mkdir()
    (data / ".cache").mkdir()
    write_parquet(data / "rows.parquet")
    write_parquet(data / ".cache")
    corpus = open_corpus(files_config(str(data), cache))
    assert corpus.num_documents == len(texts())
    assert corpus.origin(0).shard == "rows.parquet/part-0.parquet"


def test_a_corpus_may_move_though_its_glob_has_wildcards_in_folders(tmp_path):
    for name in ("one", "two"):
        (tmp_path / "here" / name).mkdir(parents=True)
        write_parquet(tmp_path / "here" / name)
    cache = tmp_path / "cache"
    before = open_corpus(files_config(str(tmp_path / "here/*/part-*.parquet"), cache))
    shutil.move(tmp_path / "here", tmp_path / "there")
    after = open_corpus(files_config(str(tmp_path / "there/*/part-*.parquet"), cache))
    assert after.fingerprint == before.fingerprint
    assert after.origin(0).shard == "one/part-0.parquet"


def test_only_the_text_column_of_a_hub_dataset_is_decoded(folders):
    data, cache = folders
    # An image that is none: reading the whole row would fail.
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": b"no image", "path": None}] * 20, type=kind)
    table = pa.table({"text": [f"text {n}" for n in range(20)], "image": images})
    features = '{"info": {"features": {"text": {"dtype": "string", "_type": "Value"}, "image": {"_type": "Image"}}}}'
    pq.write_table(table.replace_schema_metadata({"huggingface": features}), data / "a.parquet")
    source = SourceConfig(kind=SourceKind.hub, path=str(data))
    corpus = open_corpus(DataConfig(sources={"hub": source}, lanes=2, cache_dir=str(cache)))
    assert corpus.text(7) == "text 7"


def test_a_tokenizer_keeps_its_identity_when_it_is_used():
    """Its own truncation is switched off by the first call: a resumed run, which may make none, must not differ."""
    backend = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    backend.enable_truncation(16)
    backend.enable_padding(length=8, pad_id=0, pad_token="<|endoftext|>")
    other = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    before = tokenizer_digest(other)
    assert before == tokenizer_digest(tokenizer())
    assert len(encode(other, texts()[40])) > 16
    assert tokenizer_digest(other) == before


class TestCursor:
    @pytest.fixture
    def stream(self, folders):
        data, cache = folders
        config = files_config(write_txt(data), cache, lanes=3)
        return TokenStream(open_corpus(config), tokenizer(), config)

    @pytest.mark.parametrize(
        "places",
        [
            [[0, 0, 0, 0], [1, 0, 0, 0]],
            [[lane, 0, 10**9, 0] for lane in range(3)],
            [[lane, 0, -1, 0] for lane in range(3)],
            [[lane, -1, 0, 0] for lane in range(3)],
        ],
    )
    def test_a_place_that_cannot_be_is_refused(self, stream, places):
        with pytest.raises(CheckpointError, match="cursor is damaged"):
            stream.load_state_dict(stream.state_dict() | {"places": places})

    def test_a_negative_count_is_refused(self, stream):
        with pytest.raises(CheckpointError, match="cursor is damaged"):
            stream.load_state_dict(stream.state_dict() | {"samples": -12})

    def test_an_offset_behind_the_document_is_refused_instead_of_read_as_something_else(self, stream):
        stream.load_state_dict(stream.state_dict() | {"places": [[lane, 0, 0, 10**6] for lane in range(3)]})
        with pytest.raises(CheckpointError, match="behind the end of a document"):
            next(iter(stream))


def test_a_killed_worker_is_told_in_one_message(folders):
    data, cache = folders
    config = files_config(write_txt(data), cache, workers=1, prefetch=2)
    batches = iter(TokenStream(open_corpus(config), tokenizer(), config).loader(micro_batch_size=2))
    others = set(multiprocessing.active_children())
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(ResourceError, match=r"(?s)has died.*data\.workers"):
        for _ in range(100):
            next(batches)
