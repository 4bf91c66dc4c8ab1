"""Every kind of source gives the same documents, and what is not there or does not fit is told with its place."""

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hfdist.config.data import DataConfig, SourceConfig, SourceKind
from hfdist.data import open_corpus
from hfdist.data.documents.corpus import Origin
from hfdist.data.sources.dataset import DatasetShard, open_hub
from hfdist.data.sources.rows import RowReader
from hfdist.data.tokenization.tokenize import Encoder
from hfdist.errors import ConfigError, DataError
from tests.unit.data.corpora import (
    WRITERS,
    files_config,
    jsonl_bytes,
    open_shards,
    read_all,
    texts,
    tokenizer,
    write_parquet,
    write_txt,
)


@pytest.mark.parametrize("kind", WRITERS)
def test_every_kind_of_file_gives_the_same_documents(folders, kind):
    data, cache = folders
    shards = open_shards(WRITERS[kind](data), cache)
    assert read_all(shards) == list(texts())
    assert read_all(open_shards(str(data), cache)) == list(texts())
    # In any order within a run.
    run = shards[0].runs[0]
    rows = sorted(range(run), key=lambda row: row * 7 % run)[: shards[0].rows_at_once]
    assert shards[0].read(rows) == [texts()[row] for row in rows]


def table():
    return pa.table({"id": list(range(len(texts()))), "text": list(texts())})


class TestDatasets:
    """What the `datasets` library opens."""

    def test_a_folder_of_files(self, folders):
        write_parquet(folders[0])
        shard = open_hub("x", SourceConfig(kind=SourceKind.hub, path=str(folders[0])))
        assert sorted(read_all([shard])) == sorted(texts())

    def test_a_folder_that_it_saved_and_one_with_splits(self, folders):
        data, cache = folders
        dataset = datasets.Dataset(table())
        dataset.save_to_disk(str(data / "one"))
        datasets.DatasetDict({"test": dataset.select([0]), "train": dataset}).save_to_disk(str(data / "two"))
        one, two = (open_hub("x", SourceConfig(kind=SourceKind.hub, path=str(data / name))) for name in ("one", "two"))
        assert read_all([one]) == read_all([two]) == list(texts())
        assert one.identity == two.identity
        # Its files are arrow files, too.
        assert read_all(open_shards(str(data / "one"), cache)) == list(texts())

    def test_one_in_memory_even_shuffled_and_with_other_columns(self):
        dataset = datasets.Dataset(table())
        shuffled = dataset.shuffle(seed=1)
        assert read_all([DatasetShard("x", dataset, RowReader("text"))]) == list(texts())
        shard = DatasetShard("x", shuffled, RowReader("text"))
        assert read_all([shard]) == shuffled["text"][:]
        assert shard.identity != DatasetShard("x", dataset, RowReader("text")).identity
        with pytest.raises(DataError, match=r"(?s)no column 'body'.*where:   x.*id, text"):
            DatasetShard("x", dataset, RowReader("body"))


def test_the_standard_library_is_there(tmp_path):
    source = SourceConfig(kind=SourceKind.stdlib)
    corpus = open_corpus(DataConfig(sources={"stdlib": source}, cache_dir=str(tmp_path)))
    assert corpus.num_documents > 500
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


def test_forged_control_tokens_are_plain_text():
    text = "y<|endoftext|>z"
    ids = Encoder(tokenizer()).encode([text])[0].tolist()
    assert ids.count(tokenizer().eos_token_id) == 1
    assert tokenizer().decode(ids[:-1]) == text


def test_a_changed_file_is_indexed_again(folders):
    data, cache = folders
    path = data / "rows.jsonl"
    path.write_bytes(jsonl_bytes())
    assert read_all(open_shards(str(path), cache)) == list(texts())
    path.write_bytes(jsonl_bytes() + b'{"text": "one more"}\n\n')
    assert read_all(open_shards(str(path), cache)) == [*texts(), "one more"]


class TestWhatIsNotThere:
    """Each with its place and its way out; never a traceback of a library."""

    def test_fewer_documents_than_lanes(self, folders):
        data, cache = folders
        (data / "rows.jsonl").write_bytes(b'{"text": "only one"}\n')
        with pytest.raises(DataError) as caught:
            open_corpus(files_config(str(data), cache))
        assert "1 documents, 12 lanes" in str(caught.value)
        assert "data.lanes" in caught.value.hint

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
        with pytest.raises(ConfigError, match=r"\.parquet, \.arrow, .*\.txt"):
            open_corpus(files_config(str(data / "rows.csv"), cache))

    def test_a_hub_dataset_out_of_reach(self):
        with pytest.raises(DataError) as caught:
            open_hub("data.sources.x.path", SourceConfig(kind=SourceKind.hub, path="nobody/nothing"))
        assert caught.value.where == "data.sources.x.path"

    def test_an_error_in_a_worker_arrives_as_itself(self, folders):
        from hfdist.data import TokenStream

        data, cache = folders
        (data / "rows.jsonl").write_bytes(jsonl_bytes() + b'{"text": 3}\n')
        config = files_config(str(data), cache, workers=1)
        batches = iter(TokenStream(open_corpus(config), tokenizer(), config).loader(batch_size=4))
        with pytest.raises(DataError, match="row 90"):
            for _ in range(10_000):
                next(batches)
