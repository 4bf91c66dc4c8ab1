"""Every kind of source gives the same documents, and what is not there or does not fit is told with its place."""

import gzip
import itertools
import os
import random
import shutil

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast, T5Tokenizer

from hfdist.config.data import BadRows, DataConfig, SourceConfig, SourceKind
from hfdist.data import TokenStream, open_corpus
from hfdist.data.documents.token_reader import Documents, open_token_cache
from hfdist.data.order import shuffle
from hfdist.data.sources import parquet_file
from hfdist.data.sources.base import HELD_BYTES, MOST_ROWS_AT_ONCE, ContentError, damage
from hfdist.data.sources.columns import Column
from hfdist.data.sources.dataset import DatasetShard, open_hub
from hfdist.data.sources.find import SUFFIXES
from hfdist.data.sources.parquet_file import ParquetShard
from hfdist.data.sources.rows import RowReader
from hfdist.data.storage.filecache import FileCache
from hfdist.data.storage.find import find_files
from hfdist.data.tokenization.encoders import Encoders
from hfdist.data.tokenization.text_encoder import Encoder, plain_backend, tokenizer_digest
from hfdist.errors import ConfigError, DataError, ResourceError
from tests.unit.data.corpora import (
    WRITERS,
    files_config,
    jsonl_bytes,
    open_shards,
    read_all,
    table_of_texts,
    texts,
    tokenizer,
    write_parquet,
    write_rows,
    write_txt,
)
from tests.unit.data.servers import Slow


class TestDatasets:
    """What the `datasets` library opens."""

    def test_a_folder_that_it_saved_and_one_with_splits(self, data, cache):
        dataset = datasets.Dataset(table_of_texts())
        dataset.save_to_disk(str(data / "one"))
        datasets.DatasetDict({"test": dataset.select([0]), "train": dataset}).save_to_disk(str(data / "two"))
        one, two = (open_hub("x", SourceConfig(kind=SourceKind.hub, path=str(data / name))) for name in ("one", "two"))
        assert read_all([one]) == read_all([two]) == list(texts())
        assert one.identity == two.identity
        # Its files are arrow files, too.
        assert read_all(open_shards(str(data / "one"), cache)) == list(texts())

    def test_one_in_memory_even_shuffled_and_with_other_columns(self):
        dataset = datasets.Dataset(table_of_texts())
        shuffled = dataset.shuffle(seed=1)
        assert read_all([DatasetShard("x", dataset, RowReader())]) == list(texts())
        shard = DatasetShard("x", shuffled, RowReader())
        assert read_all([shard]) == shuffled["text"][:]
        assert shard.identity != DatasetShard("x", dataset, RowReader()).identity
        with pytest.raises(DataError, match=r"(?s)no column 'body'.*where:   x.*id, text"):
            DatasetShard("x", dataset, RowReader(Column(("body",))))


def test_the_standard_library_is_there(tmp_path):
    source = SourceConfig(kind=SourceKind.stdlib)
    corpus = open_corpus(DataConfig(sources={"stdlib": source}, cache_dir=str(tmp_path)))
    assert corpus.num_documents > 500
    origins = {corpus.origin(n).shard for n in range(corpus.num_documents)}
    assert {"abc.py", "json/decoder.py"} <= origins
    assert not any("site-packages" in shard for shard in origins)
    number = next(n for n in range(corpus.num_documents) if corpus.origin(n).shard == "json/decoder.py")
    assert "class JSONDecoder" in corpus.text(number)


def test_the_fingerprint_follows_files_the_column_and_an_edit_of_the_same_size(data, cache):
    table = pa.table({"text": list(texts()), "other": [text.upper() for text in texts()]})
    pq.write_table(table, data / "a.parquet")
    config = files_config(str(data), cache)
    first = open_corpus(config).fingerprint
    config.sources["files"].text = "other"
    assert open_corpus(config).fingerprint != first

    write_txt(data)
    (data / "a.parquet").unlink()
    before = open_corpus(config).fingerprint
    assert open_corpus(config).fingerprint == before
    path = data / "000.txt"
    path.write_bytes(path.read_bytes()[::-1])
    edited = open_corpus(config).fingerprint
    (data / "zzz.txt").write_text("more")
    assert len({before, edited, open_corpus(config).fingerprint}) == 3


def test_forged_control_tokens_are_plain_text():
    text = "y<|endoftext|>z"
    ids = Encoder(tokenizer()).encode([text])[0].tolist()
    assert ids.count(tokenizer().eos_token_id) == 1
    assert tokenizer().decode(ids[:-1]) == text


class TestWhatIsNotThere:
    """Each with its place and its way out; never a traceback of a library."""

    def test_fewer_documents_than_lanes(self, data, cache):
        (data / "rows.jsonl").write_bytes(b'{"text": "only one"}\n')
        with pytest.raises(DataError) as caught:
            open_corpus(files_config(str(data), cache))
        assert "1 documents, 12 lanes" in str(caught.value)
        assert "data.lanes" in caught.value.hint

    @pytest.mark.parametrize("path", ["nothing.parquet", "*.jsonl", "sub/**/*.txt", "rows.csv"])
    def test_no_file_that_can_be_read(self, data, cache, path):
        (data / "rows.csv").write_text("a,b\n")
        with pytest.raises(ConfigError, match=r"\.parquet, \.arrow, .*\.txt") as caught:
            open_corpus(files_config(str(data / path), cache))
        assert caught.value.where == "data.sources.files.path"
        assert path in caught.value.found

    def test_files_beside_folders_are_no_folders(self, data, cache):
        (data / "README.md").write_text("not data")
        (data / "below").mkdir(exist_ok=True)
        (data / "below" / "rows.jsonl").write_bytes(jsonl_bytes())
        assert open_corpus(files_config(str(data / "*" / "**" / "*.jsonl"), cache)).num_documents > 0

    def test_a_folder_that_cannot_be_listed_is_not_left_out(self, data, cache, monkeypatch):
        (data / "shut").mkdir()
        (data / "rows.jsonl").write_bytes(jsonl_bytes())
        scan = os.scandir

        def refusing(path="."):
            if str(path).endswith("shut"):
                raise PermissionError(13, "Permission denied", str(path))
            return scan(path)

        monkeypatch.setattr(os, "scandir", refusing)
        # What `os.walk` has imported.
        monkeypatch.setitem(os.walk.__globals__, "scandir", refusing)
        with pytest.raises(DataError, match="Permission denied") as caught:
            open_corpus(files_config(str(data), cache))
        assert caught.value.where == str(data / "shut")

    def test_an_error_in_a_worker_arrives_as_itself(self, data, cache):
        from hfdist.data import TokenStream

        (data / "rows.jsonl").write_bytes(jsonl_bytes() + b'{"text": 3}\n')
        config = files_config(str(data), cache, workers=1)
        batches = iter(TokenStream(open_corpus(config), tokenizer(), config).loader(batch_size=4))
        with pytest.raises(DataError, match="row 90"):
            for _ in range(10_000):
                next(batches)


def serve(web, folder):
    """Put the files of a folder behind the server; give the URL of theirs."""
    web.files |= {f"/texts/{path.name}": path.read_bytes() for path in folder.iterdir()}
    return f"{web.url}/texts/"


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_gives_the_same_documents_and_asks_for_no_content_at_a_second_start(web, data, cache, kind):
    local = open_shards(WRITERS[kind](data), cache)
    assert read_all(local) == read_all(open_shards(str(data), cache)) == list(texts())
    # In any order within a run.
    run = local[0].runs[0]
    rows = sorted(range(run), key=lambda row: row * 7 % run)[: local[0].rows_at_once]
    assert local[0].read(rows) == [texts()[row] for row in rows]
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


def test_of_a_table_only_its_ends_are_read_until_a_row_is_asked_for(web, data, cache):
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


def test_a_file_that_cannot_be_reached_is_no_bad_file(web, data, cache):
    pq.write_table(pa.table({"text": ["a"]}), data / "a.parquet")
    (file,) = find_files(serve(web, data), key="x", suffixes=SUFFIXES, cache=FileCache(cache, 1 << 30))
    # The first question is whether it has changed, the second is for its footer.
    web.faults[f"/texts/{file.name}"] = [Slow(0), 403]
    with pytest.raises(DataError, match="403") as caught:
        ParquetShard(file, "identity", RowReader())
    assert not isinstance(caught.value, ContentError)


def test_a_file_that_changes_before_it_is_fetched_stops_the_run_and_later_does_not_matter(web, data, cache):
    for name in ("a", "b"):
        pq.write_table(pa.table({"text": [name]}), data / f"{name}.parquet")
    fetched, other = open_shards(serve(web, data), cache, on_bad_rows="skip")
    assert fetched.read([0]) == ["a"]
    for name in ("a", "b"):
        web.replace(f"/texts/{name}.parquet", web.files[f"/texts/{name}.parquet"][:-1] + b"2")
    assert fetched.read([0]) == ["a"]
    with pytest.raises(DataError, match=r"(?s)has changed since the run began.*b\.parquet"):
        other.read([0])


def numbered(folder, num_rows, *, row_group_size, size=1):
    """A parquet file whose row n is the text `n.` repeated."""
    rows = [f"{n}." * size for n in range(num_rows)]
    pq.write_table(pa.table({"text": rows}), folder / "a.parquet", row_group_size=row_group_size)
    return rows


def test_rows_of_a_large_row_group_come_in_the_order_asked_for(data, cache):
    rows = numbered(data, 7000, row_group_size=5000)
    (shard,) = open_shards(str(data), cache)
    for asked in ([4999, 0, 1023, 1024, 3000], [2], [6999, 5000, 6000], [1025, 1024]):
        assert shard.read(asked) == [rows[n] for n in asked]


def test_long_rows_are_read_in_chunks_and_short_ones_by_the_thousand(data, cache):
    rows = numbered(data, 200, row_group_size=200, size=100_000)
    (shard,) = open_shards(str(data), cache)
    assert 1 <= shard.rows_at_once < 200
    # The estimate is of the file's mean row, so allow for the spread around it.
    assert sum(map(len, rows[: shard.rows_at_once])) < 2 * HELD_BYTES

    numbered(data, 3000, row_group_size=3000)
    (shard,) = open_shards(str(data), cache)
    assert shard.rows_at_once == MOST_ROWS_AT_ONCE


@pytest.mark.parametrize("suffix", ["arrow", "feather"])
@pytest.mark.parametrize("is_within", [False, True])
def test_a_category_beside_the_text_spoils_no_row(data, cache, suffix, is_within):
    category = pa.array(["en", "de"] * 5).dictionary_encode()
    beside = pa.StructArray.from_arrays([category], ["language"]) if is_within else category
    rows = [f"text {n}" for n in range(10)]
    write_rows(pa.table({"beside": beside, "text": rows}), data / f"a.{suffix}", 3)
    assert read_all(open_shards(str(data), cache)) == rows


def test_every_document_is_mixed_in_once_whatever_the_lanes(data, cache):
    numbered(data, 5000, row_group_size=900)
    blocks = list(open_corpus(files_config(str(data), cache)).mixed_blocks())
    mixed = [document for block in blocks for document in block]
    assert sorted(mixed) == list(range(5000))
    assert blocks == list(open_corpus(files_config(str(data), cache, lanes=3)).mixed_blocks())
    assert np.mean(np.abs(np.array(mixed[:200]) - np.arange(200))) > 1000


@pytest.mark.parametrize(("suffix", "compress"), [("gz", gzip.compress), ("zst", zstandard.compress)])
def test_compressed_parts_one_after_the_other_are_all_read(data, cache, suffix, compress):
    raw = jsonl_bytes()
    middle = raw.index(b"\n", len(raw) // 2) + 1
    (data / f"rows.jsonl.{suffix}").write_bytes(compress(raw[:middle]) + compress(raw[middle:]))
    assert read_all(open_shards(str(data), cache)) == list(texts())


def test_folders_named_like_files_are_searched_and_hidden_ones_are_not(data, cache):
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


def test_only_the_text_column_of_a_hub_dataset_is_decoded(data):
    # An image that is none: reading the whole row would fail.
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": b"no image", "path": None}] * 20, type=kind)
    table = pa.table({"text": [f"text {n}" for n in range(20)], "image": images})
    features = '{"info": {"features": {"text": {"dtype": "string", "_type": "Value"}, "image": {"_type": "Image"}}}}'
    pq.write_table(table.replace_schema_metadata({"huggingface": features}), data / "a.parquet")
    shard = open_hub("x", SourceConfig(kind=SourceKind.hub, path=str(data)))
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


def test_a_change_that_leaves_size_and_ends_alike_is_tokenized_anew(data, cache):
    path = data / "long.txt"
    config = files_config(str(data), cache, lanes=1, eval_fraction=0)

    def tokens_of(letter):
        path.write_text("same " * 20_000 + letter * 50 + " same" * 20_000)
        corpus = open_corpus(config)
        documents = Documents(corpus, Encoders(tokenizer(), config.chat), open_token_cache(config), config)
        (tokens,) = next(documents.chunks(np.array([0]))).views()
        return corpus.fingerprint, tokens.tolist()

    (before, first), (after, second) = tokens_of("a"), tokens_of("b")
    assert before == after
    assert first != second


def test_a_lane_in_a_bad_shard_goes_on_with_others(data, cache, monkeypatch):
    """Four shards that are dealt whole, one of them all bad."""
    for number in range(4):
        row = '{"text": 7}' if number == 1 else f'{{"text": "good {number}"}}'
        (data / f"{number}.jsonl").write_text(f"{row}\n" * 1500)
    monkeypatch.setattr(shuffle, "_LARGEST_BLOCK_ROWS", 64)
    config = files_config(str(data), cache, lanes=4, eval_fraction=0, on_bad_rows=BadRows.skip)
    stream = TokenStream(open_corpus(config), tokenizer(), config)
    assert sum(1 for _ in itertools.islice(stream, 2000)) == 2000


def test_too_little_memory_is_no_damage():
    with pytest.raises(ResourceError, match=r"(?s)not enough memory.*a\.parquet"):
        damage("the file is damaged", pa.ArrowMemoryError("malloc failed"), where="a.parquet")


def test_small_row_groups_are_decoded_once_though_read_in_small_blocks(data, cache, monkeypatch):
    rows = numbered(data, 3000, row_group_size=500)
    (shard,) = open_shards(str(data), cache)
    decoded = []
    decode = ParquetShard._decode
    monkeypatch.setattr(
        ParquetShard, "_decode", lambda *args, **named: decoded.append(args[-1]) or decode(*args, **named)
    )
    for first in np.random.default_rng(0).permutation(300) * 10:
        assert shard.read(range(first, first + 10)) == rows[first : first + 10]
    assert sorted(decoded) == list(range(6))


@pytest.mark.parametrize("distinct", [10**9, 900])
def test_what_is_kept_decoded_is_bounded_whatever_the_dictionaries(data, cache, distinct):
    for number in range(24):
        values = [f"{number} {n % distinct:020d}" for n in range(60_000)]
        pq.write_table(pa.table({"text": values}), data / f"{number:02d}.parquet", row_group_size=60_000)
    before = pa.total_allocated_bytes()
    for number, shard in enumerate(open_shards(str(data), cache)):
        assert shard.read([7]) == [f"{number} {7:020d}"]
    assert parquet_file.recent.num_bytes <= 64 << 20
    assert pa.total_allocated_bytes() - before < 100 << 20


def test_a_large_row_group_is_not_held_whole(data, cache):
    """Most writers begin a column with a dictionary and go on without one."""
    rows = [f"{number} " * 20_000 for number in range(240)]
    pq.write_table(pa.table({"text": rows}), data / "a.parquet", write_batch_size=1, row_group_size=240)
    (shard,) = open_shards(str(data), cache)
    usual, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        assert shard.read([3, 230]) == [rows[3], rows[230]]
    finally:
        pa.set_memory_pool(usual)
    assert 0 < pool.max_memory() < 8 << 20
