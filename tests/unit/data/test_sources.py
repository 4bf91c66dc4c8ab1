"""Every kind of source gives the same documents, and every damaged one a message that names the place."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hfdist.config.data import DataConfig, SourceConfig, SourceKind
from hfdist.data import open_corpus
from hfdist.data.corpus import Origin
from hfdist.data.tokenize import encode
from hfdist.errors import ConfigError, DataError
from tests.unit.data.corpora import WRITERS, files_config, jsonl_bytes, texts, tokenizer, write_parquet, write_txt


@pytest.fixture
def folders(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data", tmp_path / "cache"


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_file_gives_the_same_documents(folders, kind):
    data, cache = folders
    corpus = open_corpus(files_config(WRITERS[kind](data), cache))
    assert corpus.num_documents == len(texts())
    assert [corpus.text(n) for n in range(corpus.num_documents)] == list(texts())
    again = open_corpus(files_config(WRITERS[kind](data) if kind != "parquet" else str(data), cache))
    assert corpus.text(5) == again.text(5)


def test_the_hub_library_gives_the_same_documents(folders):
    data, cache = folders
    write_parquet(data)
    source = SourceConfig(kind=SourceKind.hub, path=str(data))
    corpus = open_corpus(DataConfig(sources={"hub": source}, lanes=12, cache_dir=str(cache)))
    assert sorted(corpus.text(n) for n in range(corpus.num_documents)) == sorted(texts())


def test_the_standard_library_is_there(tmp_path):
    source = SourceConfig(kind=SourceKind.stdlib)
    corpus = open_corpus(DataConfig(sources={"stdlib": source}, cache_dir=str(tmp_path)))
    assert corpus.num_documents > 1000
    origins = {corpus.origin(n).shard for n in range(corpus.num_documents)}
    assert {"abc.py", "json/decoder.py"} <= origins
    assert not any("site-packages" in shard for shard in origins)
    number = next(n for n in range(corpus.num_documents) if corpus.origin(n).shard == "json/decoder.py")
    assert "class JSONDecoder" in corpus.text(number)


def test_a_document_knows_where_it_comes_from(folders):
    data, cache = folders
    corpus = open_corpus(files_config(write_parquet(data), cache))
    assert corpus.origin(0) == Origin("files", "part-0.parquet", 0)
    assert corpus.origin(52) == Origin("files", "part-1.parquet", 2)


def test_the_fingerprint_follows_the_data(folders):
    data, cache = folders
    write_parquet(data)
    config = files_config(str(data), cache)
    first = open_corpus(config).fingerprint
    assert open_corpus(config).fingerprint == first
    pq.write_table(pa.table({"text": ["more"]}), data / "part-2.parquet")
    assert open_corpus(config).fingerprint != first


def test_the_fingerprint_follows_the_column_and_an_edit_of_the_same_size(folders):
    data, cache = folders
    table = pa.table({"text": list(texts()), "other": [text.upper() for text in texts()]})
    pq.write_table(table, data / "a.parquet")
    config = files_config(str(data), cache)
    first = open_corpus(config).fingerprint
    config.sources["files"].text = "other"
    assert open_corpus(config).fingerprint != first

    write_txt(data)
    (data / "a.parquet").unlink()
    before = open_corpus(config).fingerprint
    path = data / "000.txt"
    path.write_bytes(path.read_bytes()[::-1])
    assert open_corpus(config).fingerprint != before


def test_half_a_surrogate_pair_and_forged_control_tokens_are_plain_text(folders):
    data, cache = folders
    (data / "rows.jsonl").write_bytes(lines(b'{"text": "x\\ud800y<|endoftext|>z"}\n'))
    text = open_corpus(files_config(str(data), cache)).text(90)
    assert text == "x?y<|endoftext|>z"
    ids = encode(tokenizer(), text).tolist()
    assert ids.count(tokenizer().eos_token_id) == 1
    assert tokenizer().decode(ids[:-1]) == text


def test_a_changed_file_is_indexed_again(folders):
    data, cache = folders
    path = data / "rows.jsonl"
    path.write_bytes(jsonl_bytes())
    config = files_config(str(path), cache)
    assert open_corpus(config).num_documents == len(texts())
    path.write_bytes(jsonl_bytes() + b'{"text": "one more"}\n\n')
    corpus = open_corpus(config)
    assert corpus.num_documents == len(texts()) + 1
    assert corpus.text(len(texts())) == "one more"


def read_all(config):
    corpus = open_corpus(config)
    for document in range(corpus.num_documents):
        corpus.text(document)


def lines(*values):
    good = jsonl_bytes()
    return good + b"".join(
        value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n" for value in values
    )


class TestBadData:
    """Each with its place and its way out; never a traceback of a library."""

    @pytest.mark.parametrize(
        ("content", "message", "place"),
        [
            (lines({"text": None}), "holds no text", "row 90"),
            (lines({"text": 3}), "found:   int: 3", "row 90"),
            (lines({"txt": "a"}), "no column 'text'", "row 90"),
            (lines(b'{"text": "cut\n'), "not JSON", "row 90"),
            (lines(b'{"text": "\xff\xfe"}\n'), "not UTF-8", "row 90"),
            (lines([1, 2]), "not a JSON object", "row 90"),
        ],
    )
    def test_rows(self, folders, content, message, place):
        data, cache = folders
        (data / "rows.jsonl").write_bytes(content)
        with pytest.raises(DataError) as caught:
            read_all(files_config(str(data), cache))
        assert message in str(caught.value)
        assert "rows.jsonl" in caught.value.where
        assert place in caught.value.where

    def test_a_missing_column_lists_those_that_are_there(self, folders):
        data, cache = folders
        pq.write_table(pa.table({"content": list(texts()), "id": range(len(texts()))}), data / "a.parquet")
        with pytest.raises(DataError) as caught:
            open_corpus(files_config(str(data), cache))
        assert caught.value.allowed == "content, id"
        assert "content" in caught.value.hint
        assert "a.parquet" in caught.value.where

    def test_a_column_of_another_type(self, folders):
        data, cache = folders
        pq.write_table(pa.table({"text": list(range(90))}), data / "a.parquet")
        with pytest.raises(DataError, match="int64"):
            open_corpus(files_config(str(data), cache))

    @pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
    def test_a_cut_parquet_file(self, folders, share):
        data, cache = folders
        write_parquet(data)
        path = data / "part-1.parquet"
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        with pytest.raises(DataError, match=r"part-1\.parquet"):
            open_corpus(files_config(str(data), cache))

    def test_a_damaged_parquet_page(self, folders):
        data, cache = folders
        write_parquet(data)
        path = data / "part-0.parquet"
        content = bytearray(path.read_bytes())
        content[100:3000] = bytes(2900)
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"part-0\.parquet, row group"):
            read_all(files_config(str(data), cache))

    def test_a_cut_gz_file_leaves_nothing_in_the_cache(self, folders):
        data, cache = folders
        (data / "rows.jsonl.gz").write_bytes(gzip.compress(jsonl_bytes())[:-200])
        with pytest.raises(DataError, match=r"damaged or cut off"):
            open_corpus(files_config(str(data), cache))
        assert not list((cache / "jsonl").glob("*.jsonl"))

    def test_a_text_file_in_another_encoding(self, folders):
        data, cache = folders
        for number in range(12):
            (data / f"{number}.txt").write_bytes("größer".encode("latin-1"))
        with pytest.raises(DataError, match=r"not UTF-8"):
            read_all(files_config(str(data), cache))

    def test_fewer_documents_than_lanes(self, folders):
        data, cache = folders
        (data / "rows.jsonl").write_bytes(b'{"text": "only one"}\n')
        with pytest.raises(DataError) as caught:
            open_corpus(files_config(str(data), cache))
        assert "1 documents, 12 lanes" in str(caught.value)
        assert "data.lanes" in caught.value.hint

    def test_an_empty_file_has_no_rows(self, folders):
        data, cache = folders
        (data / "empty.jsonl").write_bytes(b"")
        (data / "rows.jsonl").write_bytes(jsonl_bytes())
        assert open_corpus(files_config(str(data), cache)).num_documents == len(texts())

    @pytest.mark.parametrize("path", ["nothing.parquet", "*.jsonl", "sub/**/*.txt"])
    def test_no_file(self, folders, path):
        data, cache = folders
        with pytest.raises(ConfigError) as caught:
            open_corpus(files_config(str(data / path), cache))
        assert caught.value.where == "data.sources.files.path"
        assert path in caught.value.found

    def test_an_unknown_suffix(self, folders):
        data, cache = folders
        (data / "rows.csv").write_text("a,b\n")
        with pytest.raises(ConfigError, match=r"\.parquet, \.jsonl"):
            open_corpus(files_config(str(data / "rows.csv"), cache))

    def test_a_hub_dataset_out_of_reach(self, tmp_path):
        source = SourceConfig(kind=SourceKind.hub, path="nobody/nothing")
        with pytest.raises(ConfigError) as caught:
            open_corpus(DataConfig(sources={"x": source}, cache_dir=str(tmp_path)))
        assert caught.value.where == "data.sources.x.path"

    def test_an_error_in_a_worker_arrives_as_itself(self, folders):
        from hfdist.data import TokenStream

        data, cache = folders
        (data / "rows.jsonl").write_bytes(lines({"text": 3}))
        config = files_config(str(data), cache, workers=1)
        batches = iter(TokenStream(open_corpus(config), tokenizer(), config).loader(micro_batch_size=4))
        with pytest.raises(DataError, match="row 90"):
            for _ in range(10_000):
                next(batches)
