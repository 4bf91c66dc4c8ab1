"""Reading neighbours together: the same texts in the same order, within a bound of memory, whatever the files."""

import collections
import gzip
import itertools
import multiprocessing
import os
import random
import shutil
import signal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, T5Tokenizer

from hfdist.config.data import BadRows, SourceConfig, SourceKind
from hfdist.data import Cursor, TokenStream, open_corpus
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.order import shuffle
from hfdist.data.sources import tables
from hfdist.data.sources.base import HELD_BYTES, MOST_ROWS_AT_ONCE, damage
from hfdist.data.sources.dataset import open_hub
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.tokenize import Encoder, plain_backend, tokenizer_digest
from hfdist.errors import CheckpointError, DataError, ResourceError
from tests.unit.data.corpora import (
    files_config,
    jsonl_bytes,
    open_shards,
    read_all,
    texts,
    tokenizer,
    write_parquet,
    write_txt,
)


def numbered(folder, num_rows, *, row_group_size, size=1):
    """A parquet file whose row n is the text `n.` repeated."""
    rows = [f"{n}." * size for n in range(num_rows)]
    pq.write_table(pa.table({"text": rows}), folder / "a.parquet", row_group_size=row_group_size)
    return rows


def test_rows_of_a_large_row_group_come_in_the_order_asked_for(folders):
    data, cache = folders
    rows = numbered(data, 7000, row_group_size=5000)
    (shard,) = open_shards(str(data), cache)
    for asked in ([4999, 0, 1023, 1024, 3000], [2], [6999, 5000, 6000], [1025, 1024]):
        assert shard.read(asked) == [rows[n] for n in asked]


def test_long_rows_are_read_in_chunks_and_short_ones_by_the_thousand(folders):
    data, cache = folders
    rows = numbered(data, 200, row_group_size=200, size=100_000)
    (shard,) = open_shards(str(data), cache)
    assert 1 <= shard.rows_at_once < 200
    # The estimate is of the file's mean row, so allow for the spread around it.
    assert sum(map(len, rows[: shard.rows_at_once])) < 2 * HELD_BYTES

    numbered(data, 3000, row_group_size=3000)
    (shard,) = open_shards(str(data), cache)
    assert shard.rows_at_once == MOST_ROWS_AT_ONCE


def test_a_lane_decodes_a_row_group_once_a_block(folders, monkeypatch):
    data, cache = folders
    numbered(data, 4000, row_group_size=4000)
    config = files_config(str(data), cache, lanes=4)
    stream = TokenStream(open_corpus(config), tokenizer(), config)
    together = []
    decode = tables.ParquetShard._decode_rows
    monkeypatch.setattr(
        tables.ParquetShard, "_decode_rows", lambda *args: together.append(len(args[-1])) or decode(*args)
    )
    sequences = iter(stream)
    while Cursor.from_json(stream.state_dict()).lanes[0].pools[0].place.position < 300:
        next(sequences)
    # Blocks of 4000 // (4 * 16) = 62 rows.
    assert np.mean(together) > 60


def test_every_document_is_mixed_in_once_whatever_the_lanes(folders):
    data, cache = folders
    numbered(data, 5000, row_group_size=900)
    blocks = list(open_corpus(files_config(str(data), cache)).mixed_blocks())
    mixed = [document for block in blocks for document in block]
    assert sorted(mixed) == list(range(5000))
    assert blocks == list(open_corpus(files_config(str(data), cache, lanes=3)).mixed_blocks())
    assert np.mean(np.abs(np.array(mixed[:200]) - np.arange(200))) > 1000


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstandard.compress)])
def test_compressed_parts_one_behind_the_other_are_all_read(folders, suffix, compress):
    data, cache = folders
    raw = jsonl_bytes()
    middle = raw.index(b"\n", len(raw) // 2) + 1
    (data / f"rows.jsonl.{suffix}").write_bytes(compress(raw[:middle]) + compress(raw[middle:]))
    assert read_all(open_shards(str(data), cache)) == list(texts())


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
        rows = [f"{name}, {text}" for text in texts()]
        pq.write_table(pa.table({"text": rows}), tmp_path / "here" / name / "part-0.parquet")
    cache = tmp_path / "cache"
    before = open_corpus(files_config(str(tmp_path / "here/*/part-*.parquet"), cache))
    shutil.move(tmp_path / "here", tmp_path / "there")
    after = open_corpus(files_config(str(tmp_path / "there/*/part-*.parquet"), cache))
    assert after.fingerprint == before.fingerprint
    assert after.origin(0).shard == "one/part-0.parquet"


def test_only_the_text_column_of_a_hub_dataset_is_decoded(folders):
    # An image that is none: reading the whole row would fail.
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": b"no image", "path": None}] * 20, type=kind)
    table = pa.table({"text": [f"text {n}" for n in range(20)], "image": images})
    features = '{"info": {"features": {"text": {"dtype": "string", "_type": "Value"}, "image": {"_type": "Image"}}}}'
    pq.write_table(table.replace_schema_metadata({"huggingface": features}), folders[0] / "a.parquet")
    shard = open_hub("x", SourceConfig(kind=SourceKind.hub, path=str(folders[0])))
    assert shard.read([7]) == ["text 7"]


def test_a_tokenizer_keeps_its_identity_when_it_is_used():
    """Its own truncation is switched off by the first call: a resumed run, which may make none, must not differ."""
    backend = Tokenizer.from_str(tokenizer().backend_tokenizer.to_str())
    backend.enable_truncation(16)
    backend.enable_padding(length=8, pad_id=0, pad_token="<|endoftext|>")
    other = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|endoftext|>")
    before = tokenizer_digest(other)
    assert before == tokenizer_digest(tokenizer())
    assert len(Encoder(other).encode([texts()[40]])[0]) > 16
    assert tokenizer_digest(other) == before


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_tokenizer_and_its_copy_have_one_identity(kind):
    """Scores of a Unigram model lose their last digits when they are read."""
    draw = random.Random(0)
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((chr(97 + n), -20 * draw.random()) for n in range(26))]
    made = tokenizer() if kind == "bpe" else T5Tokenizer(vocab=pieces, unk_token="<unk>", eos_token="</s>", extra_ids=0)
    backend = plain_backend(made)
    copy = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=made.bos_token, eos_token=made.eos_token)
    assert (made.backend_tokenizer.to_str() == backend.to_str()) == (kind == "bpe")
    assert tokenizer_digest(made) == tokenizer_digest(copy)


def test_a_change_that_leaves_size_and_ends_alike_is_tokenized_anew(folders):
    data, cache = folders
    path = data / "long.txt"
    config = files_config(str(data), cache, lanes=1, eval_fraction=0)

    def tokens_of(letter):
        path.write_text("same " * 20_000 + letter * 50 + " same" * 20_000)
        corpus = open_corpus(config)
        documents = Documents(corpus, Encoders(tokenizer(), config.chat), open_token_cache(config), config)
        (document,) = next(documents.read([0]))
        return corpus.fingerprint, document.tokens.tolist()

    (before, first), (after, second) = tokens_of("a"), tokens_of("b")
    assert before == after
    assert first != second


class TestBarrenLanes:
    """Four shards that are dealt whole, one of them all bad."""

    @pytest.fixture
    def config(self, folders):
        data, cache = folders
        for number in range(4):
            row = '{"text": 7}' if number == 1 else f'{{"text": "good {number}"}}'
            (data / f"{number}.jsonl").write_text(f"{row}\n" * 1500)
        return files_config(str(data), cache, lanes=1, eval_fraction=0, on_bad_rows=BadRows.skip)

    @pytest.fixture
    def stream(self, config, monkeypatch):
        monkeypatch.setattr(shuffle, "_LARGEST_BLOCK_ROWS", 64)
        config.lanes = 4
        return TokenStream(open_corpus(config), tokenizer(), config)

    def test_a_lane_in_a_bad_shard_goes_on_with_others(self, stream):
        assert sum(1 for _ in itertools.islice(stream, 2000)) == 2000

    def test_a_limit_ends_it_like_the_others(self, config, stream):
        config.sources["files"].epochs = 1
        stream = TokenStream(open_corpus(config), tokenizer(), config)
        assert sum(1 for _ in stream) > 300
        assert stream.has_ended

    @pytest.mark.parametrize("taken_out", [False, True])
    def test_nothing_but_bad_or_quarantined_rows_is_told(self, config, folders, taken_out):
        for number in (0, 2, 3):
            (folders[0] / f"{number}.jsonl").unlink()
        if taken_out:
            (folders[0] / "1.jsonl").write_text('{"text": "good"}\n' * 200)
            config.quarantine = [f"files:1.jsonl:{row}" for row in range(200)]
        with pytest.raises(DataError, match="a lane has no training documents"):
            collections.deque(TokenStream(open_corpus(config), tokenizer(), config), maxlen=0)


def test_too_little_memory_is_no_damage():
    with pytest.raises(ResourceError, match=r"(?s)not enough memory.*a\.parquet"):
        damage("the file is damaged", pa.ArrowMemoryError("malloc failed"), where="a.parquet")


class TestCursor:
    @pytest.fixture
    def stream(self, folders):
        data, cache = folders
        config = files_config(write_txt(data), cache, lanes=3)
        return TokenStream(open_corpus(config), tokenizer(), config)

    @pytest.mark.parametrize(
        "places",
        [
            [[0, "0", [0, 0, 0, 0, 0]], [1, "0", [0, 0, 0, 0, 0]]],
            [[lane, "0", [0, 10**9, 0, 0, 0]] for lane in range(3)],
            [[lane, "0", [0, -1, 0, 0, 0]] for lane in range(3)],
            [[lane, "0", [-1, 0, 0, 0, 0]] for lane in range(3)],
            [[lane, "x", [0, 0, 0, 0, 0]] for lane in range(3)],
            [[lane, "0"] for lane in range(3)],
        ],
    )
    def test_a_place_that_cannot_be_is_refused(self, stream, places):
        with pytest.raises(CheckpointError, match="cursor is damaged"):
            stream.load_state_dict(stream.state_dict() | {"places": places})

    def test_a_negative_count_is_refused(self, stream):
        with pytest.raises(CheckpointError, match="cursor is damaged"):
            stream.load_state_dict(stream.state_dict() | {"samples": -12})

    def test_an_offset_behind_the_document_is_refused_instead_of_read_as_something_else(self, stream):
        places = [[lane, "0", [0, 0, 10**6, 0, 0]] for lane in range(3)]
        stream.load_state_dict(stream.state_dict() | {"places": places})
        with pytest.raises(CheckpointError, match="behind the end of a document"):
            next(iter(stream))


def test_a_killed_worker_is_told_in_one_message(folders):
    data, cache = folders
    config = files_config(write_txt(data), cache, workers=1, prefetch=2)
    batches = iter(TokenStream(open_corpus(config), tokenizer(), config).loader(batch_size=2))
    others = set(multiprocessing.active_children())
    next(batches)
    (worker,) = set(multiprocessing.active_children()) - others
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(ResourceError, match=r"(?s)has died.*data\.workers"):
        for _ in range(100):
            next(batches)


def test_small_row_groups_are_decoded_once_though_read_in_small_blocks(folders, monkeypatch):
    data, cache = folders
    rows = numbered(data, 3000, row_group_size=500)
    (shard,) = open_shards(str(data), cache)
    decoded = []
    decode = tables.ParquetShard._decode
    monkeypatch.setattr(
        tables.ParquetShard, "_decode", lambda *args, **named: decoded.append(args[-1]) or decode(*args, **named)
    )
    for first in np.random.default_rng(0).permutation(300) * 10:
        assert shard.read(range(first, first + 10)) == rows[first : first + 10]
    assert sorted(decoded) == list(range(6))


@pytest.mark.parametrize("distinct", [10**9, 15_000, 900])
def test_what_is_kept_decoded_is_bounded_whatever_the_dictionaries(folders, distinct):
    data, cache = folders
    for number in range(24):
        values = [f"{number} {n % distinct:020d}" for n in range(60_000)]
        pq.write_table(pa.table({"text": values}), data / f"{number:02d}.parquet", row_group_size=60_000)
    before = pa.total_allocated_bytes()
    for number, shard in enumerate(open_shards(str(data), cache)):
        assert shard.read([7]) == [f"{number} {7:020d}"]
    assert tables.recent.num_bytes <= 64 << 20
    assert pa.total_allocated_bytes() - before < 100 << 20


def test_large_row_groups_are_not_kept(folders, monkeypatch):
    data, cache = folders
    rows = numbered(data, 60, row_group_size=60, size=100_000)
    (shard,) = open_shards(str(data), cache)
    monkeypatch.setattr(tables.recent, "put", None)
    assert shard.read([3, 1]) == [rows[3], rows[1]]
