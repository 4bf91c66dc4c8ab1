"""An index of a corpus: a run over it reads what a run that opens the files does, and asks nothing before it reads."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from dataclasses import replace

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
import yaml

from hfdist.config.composition.compose import compose_config
from hfdist.config.data import BadRows, DataConfig, RowFormat, SourceConfig, SourceKind
from hfdist.data import open_corpus
from hfdist.data.index import _Part, index_sources
from hfdist.data.sources import find
from hfdist.data.sources.index_file import (
    FILES,
    STARTS,
    SUMMARY,
    hash_of,
    read_files,
    read_summary,
    write_files,
    write_summary,
)
from hfdist.data.sources.rows import RowReader
from hfdist.errors import ConfigError, DataError
from tests.unit.data.corpora import WRITERS, files_config, jsonl_bytes, table_of_texts, texts, write_rows
from tests.unit.data.streams import Run
from tests.unit.data.test_sources import serve

STEPS = 4
_WRITE = _Part.write


def indexed(config, folder):
    """The same config, with an index that is made now."""
    index_sources(config, folder)
    return over(config, folder)


def over(config, folder):
    return replace(config, sources={"files": replace(config.sources["files"], index=str(folder / "files"))})


def batches_of(corpus, config):
    run = Run(corpus, config, 2)
    return [{name: rows.tolist() for name, rows in run.step().items()} for _ in range(STEPS)], run.state()


@pytest.mark.parametrize("kind", WRITERS)
def test_order_batches_and_cursor_are_those_of_the_files_themselves(data, cache, tmp_path, kind):
    config = files_config(WRITERS[kind](data), cache)
    plain = open_corpus(config)
    corpus = open_corpus(indexed(config, tmp_path / "index"))
    assert (corpus.fingerprint, corpus.inventory.digest) == (plain.fingerprint, plain.inventory.digest)
    assert [(one.name, one.local_identity, [*one.runs]) for _, one in corpus.shards] == [
        (one.name, one.local_identity, [*one.runs]) for _, one in plain.shards
    ]
    assert batches_of(corpus, config) == batches_of(plain, config)
    assert not corpus.inventory.changes_from(plain.inventory)


def test_names_of_any_letters_have_one_fingerprint(data, cache, tmp_path):
    for number, name in enumerate(
        (
            'a "b".jsonl',
            "b\\c.jsonl",
            "d é.jsonl",
            "e'.jsonl",
            "f\t%2e%2e.jsonl",
            "plain.jsonl",
            "デ\u3000タ.jsonl",
            "\U0001f600.jsonl",
        )
    ):
        (data / name).write_bytes(jsonl_bytes() + b'{"text": "%d"}\n' % number)
    config = files_config(str(data), cache)
    plain, corpus = open_corpus(config), open_corpus(indexed(config, tmp_path / "index"))
    assert (corpus.fingerprint, corpus.inventory.digest) == (plain.fingerprint, plain.inventory.digest)
    assert corpus.sources["files"].number_of("d é.jsonl") == 2
    assert [corpus.text(document) for document in range(0, corpus.num_documents, len(texts()) + 1)] == [texts()[0]] * 8


@pytest.mark.parametrize(
    ("store", "kind"), [("web", "parquet"), ("web", "jsonl.gz"), ("web", "txt"), ("s3", "parquet")]
)
def test_nothing_is_asked_of_a_server_before_a_row_is_read(request, data, cache, tmp_path, store, kind):
    server = request.getfixturevalue(store)
    WRITERS[kind](data)
    if store == "s3":
        for path in data.iterdir():
            server.put(f"texts/{path.name}", path.read_bytes())
    config = files_config("s3://corpus/texts/*.parquet" if store == "s3" else serve(server, data), cache)
    expected = batches_of(open_corpus(config), config)
    config = indexed(config, tmp_path / "index")
    shutil.rmtree(cache)
    server.requests.clear()
    corpus = open_corpus(config)
    assert not server.requests
    assert batches_of(corpus, config) == expected
    assert server.requests


def test_one_file_at_an_address_with_a_query(web, data, cache, tmp_path):
    WRITERS["jsonl"](data)
    serve(web, data)
    config = files_config(f"{web.url}/texts/rows.jsonl?version=2", cache)
    (shard,) = open_corpus(indexed(config, tmp_path / "index")).sources["files"]
    assert list(shard.read(range(3))) == list(texts()[:3])


@pytest.mark.parametrize("path", ["memory://corpus/texts/", "memory://corpus/texts/*.jsonl"])
def test_an_address_that_the_store_writes_otherwise_is_told_as_the_store_writes_it(cache, tmp_path, path):
    store = fsspec.filesystem("memory")
    for name in ("a", "b"):
        store.pipe(f"/corpus/texts/{name}.jsonl", jsonl_bytes() + f'{{"text": "{name}"}}\n'.encode())
    with pytest.raises(ConfigError, match="not below the source's") as caught:
        index_sources(files_config(path, cache), tmp_path / "index")
    (override,) = shlex.split(caught.value.hint)
    config = files_config(yaml.safe_load(override.partition("=")[2]), cache)
    assert open_corpus(indexed(config, tmp_path / "index")).num_documents == 2 * len(texts()) + 2


def test_a_file_that_has_changed_on_a_server_is_told_when_it_is_fetched(web, data, cache, tmp_path):
    WRITERS["parquet"](data)
    config = indexed(files_config(serve(web, data), cache), tmp_path / "index")
    shutil.rmtree(cache)
    web.replace("/texts/part-1.parquet", web.files["/texts/part-1.parquet"])
    corpus = open_corpus(config)
    assert corpus.text(3) == texts()[3]
    with pytest.raises(DataError, match=r"(?s)changed since it was indexed.*part-1\.parquet.*hfdist index"):
        corpus.text(70)


class TestShards:
    @pytest.fixture
    def config(self, data, cache):
        for number in range(7):
            write_rows(table_of_texts(number, number + 12), data / f"{number}.parquet", 5)
        shutil.copy(data / "1.parquet", data / "8.parquet")  # in another part than the first
        (data / "3.jsonl").write_bytes(b"")
        return files_config(str(data), cache, on_bad_rows=BadRows.skip)

    @staticmethod
    def files(folder):
        return {path.name: path.read_bytes() for path in (folder / "files").iterdir()}

    @pytest.mark.parametrize("count", [3, 20])
    def test_they_are_the_bytes_of_one_process(self, config, tmp_path, count):
        index_sources(config, tmp_path / "one")
        for number in reversed(range(count)):
            assert not (tmp_path / "many" / "files" / SUMMARY).exists()
            index_sources(replace(config, shard=f"{number}/{count}"), tmp_path / "many")
        assert self.files(tmp_path / "many") == self.files(tmp_path / "one")
        assert sorted(self.files(tmp_path / "one")) == sorted([SUMMARY, FILES, STARTS])
        corpus = open_corpus(over(config, tmp_path / "many"))
        assert [shard.name for _, shard in corpus.shards] == [f"{number}.parquet" for number in range(7)]
        assert len(read_summary(tmp_path / "one" / "files" / SUMMARY).left_out) == 2

    def test_one_that_was_killed_starts_again(self, config, tmp_path, monkeypatch):
        index_sources(config, tmp_path / "one")
        index_sources(replace(config, shard="0/2"), tmp_path / "many")
        with monkeypatch.context() as patch:
            patch.setattr("hfdist.data.index.write_files", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                index_sources(replace(config, shard="1/2"), tmp_path / "many")
        index_sources(replace(config, shard="1/2"), tmp_path / "many")
        assert self.files(tmp_path / "many") == self.files(tmp_path / "one")

    @pytest.mark.parametrize(("number", "others"), [("1/2", ["0/2", "1/2"]), ("0/3", ["0/1"])])
    def test_what_others_finish_meanwhile_is_finished(self, config, tmp_path, monkeypatch, caplog, number, others):
        """A twin of the same share, or one process alone, joins all while this one writes."""
        index_sources(config, tmp_path / "one")

        def write(part, entries, read, on_bad):
            def entries_and_others():
                yield next(entries)
                monkeypatch.setattr(_Part, "write", _WRITE)
                for other in others:
                    index_sources(replace(config, shard=other), tmp_path / "many")
                yield from entries

            _WRITE(part, entries_and_others(), read, on_bad)

        monkeypatch.setattr(_Part, "write", write)
        index_sources(replace(config, shard=number), tmp_path / "many")
        assert self.files(tmp_path / "many") == self.files(tmp_path / "one")

    def test_one_that_has_written_when_others_join_says_so(self, config, tmp_path, monkeypatch, caplog):
        caplog.set_level("INFO")
        index_sources(replace(config, shard="0/2"), tmp_path)

        def write(part, *arguments):
            _WRITE(part, *arguments)
            monkeypatch.setattr(_Part, "write", _WRITE)
            index_sources(replace(config, shard="1/2"), tmp_path)
            caplog.clear()

        monkeypatch.setattr(_Part, "write", write)
        index_sources(replace(config, shard="1/2"), tmp_path)
        assert "missing" not in caplog.text
        assert "train with" in caplog.text

    def test_one_that_saw_other_files_is_refused(self, config, data, tmp_path):
        index_sources(replace(config, shard="0/2"), tmp_path)
        write_rows(table_of_texts(), data / "9.parquet", 5)
        with pytest.raises(DataError, match=r"(?s)part of the index is of other files.*start that share again"):
            index_sources(replace(config, shard="1/2"), tmp_path)
        index_sources(replace(config, shard="0/2"), tmp_path)
        assert read_summary(tmp_path / "files" / SUMMARY) is not None

    def test_files_that_are_left_out_stop_who_wants_all(self, config, tmp_path):
        config = indexed(config, tmp_path)
        with pytest.raises(DataError, match=r"(?s)lacks files.*2 left out.*data\.on_bad_rows=skip"):
            open_corpus(replace(config, on_bad_rows=BadRows.error))
        with pytest.raises(DataError):
            index_sources(replace(config, on_bad_rows=BadRows.error), tmp_path / "other")


ROWS = [f"{number:05d} " + "lorem ipsum " * 25 for number in range(2000)]


class TestChangedFiles:
    @pytest.fixture
    def config(self, data, cache, tmp_path):
        for name in ("a", "b"):
            write_rows(pa.table({"text": [f"{name} {row}" for row in ROWS]}), data / f"{name}.jsonl")
        return indexed(files_config(str(data), cache), tmp_path / "index")

    def edit(self, path, offset=0):
        content = bytearray(path.read_bytes())
        content[content.index(b"01050 lorem") + 6] ^= 1
        path.write_bytes(bytes(content) + b"x" * offset)

    def test_an_edit_is_told_with_its_rows_and_other_files_are_read(self, config, data, tmp_path):
        self.edit(data / "b.jsonl")
        corpus = open_corpus(config)
        assert corpus.text(0) == f"a {ROWS[0]}"
        with pytest.raises(
            DataError, match=r"(?s)changed since it was indexed.*b\.jsonl, rows 10\d\d to 10\d\d.*hfdist index"
        ):
            corpus.text(2000)
        with pytest.raises(
            DataError, match=r"(?s)changed since they were indexed.*files:b\.jsonl, rows 10\d\d to 10\d\d"
        ):
            index_sources(config, tmp_path / "index")

    def test_another_time_alone_is_no_change(self, config, data, tmp_path):
        os.utime(data / "b.jsonl", ns=(0, 0))
        assert open_corpus(config).text(2003) == f"b {ROWS[3]}"
        index_sources(config, tmp_path / "index")

    def test_of_what_is_too_large_to_be_compared_another_time_is_one(self, data, cache, tmp_path, monkeypatch):
        monkeypatch.setattr(find, "MOST_BYTES", 1000)
        write_rows(pa.table({"text": ROWS}), data / "a.jsonl")
        config = indexed(files_config(str(data), cache), tmp_path / "index")
        assert open_corpus(config).text(3) == ROWS[3]
        assert open_corpus(config).inventory.digest == open_corpus(files_config(str(data), cache)).inventory.digest
        os.utime(data / "a.jsonl", ns=(0, 0))
        with pytest.raises(DataError, match="changed since it was indexed"):
            open_corpus(config).text(3)
        with pytest.raises(DataError, match=r"(?s)changed since they were indexed.*by their times"):
            index_sources(config, tmp_path / "index")

    def test_a_missing_a_shrunk_and_a_new_one(self, config, data, tmp_path):
        content = (data / "b.jsonl").read_bytes()
        (data / "b.jsonl").write_bytes(content[:-400])
        with pytest.raises(DataError, match=rf"(?s)changed since it was indexed.*{len(content) - 400:,} bytes"):
            open_corpus(config).text(2000)
        (data / "b.jsonl").rename(data / "c.jsonl")
        corpus = open_corpus(config)
        assert corpus.text(0) == f"a {ROWS[0]}"
        assert str(corpus.origin(2003)) == "files:b.jsonl:3"
        with pytest.raises(DataError, match=r"(?s)file of the index is gone.*b\.jsonl.*hfdist index"):
            corpus.text(2000)
        with pytest.raises(DataError, match=r"(?s)c\.jsonl is new.*b\.jsonl is gone"):
            index_sources(config, tmp_path / "index")

    def test_places_are_those_of_the_files_themselves(self, config, data, tmp_path, monkeypatch):
        monkeypatch.chdir(data)
        monkeypatch.setattr(find, "MOST_BYTES", 1000)
        for path in (".", "*.jsonl"):
            config = files_config(path, tmp_path / "cache")
            places = [one.place for one in open_corpus(config).sources["files"].facts()]
            corpus = open_corpus(indexed(config, tmp_path / f"index of {len(path)}"))
            assert [one.place for one in corpus.sources["files"].facts()] == places != [None, None]

    def test_a_corpus_may_move(self, config, data, tmp_path):
        data.rename(tmp_path / "elsewhere")
        source = replace(config.sources["files"], path=str(tmp_path / "elsewhere"))
        assert open_corpus(replace(config, sources={"files": source})).text(2003) == f"b {ROWS[3]}"


def forge(folder, **columns):
    """Write other values into the rows of an index, with the hash that they have."""
    summary = read_summary(folder / SUMMARY)
    table = pa.Table.from_batches([read_files(folder / FILES, summary.files_hash)])
    for name, values in columns.items():
        place = table.column_names.index(name)
        table = table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type))
    (folder / FILES).unlink()
    write_summary(folder / SUMMARY, replace(summary, files_hash=write_files(folder / FILES, table)))


class TestForeignIndex:
    @pytest.fixture
    def config(self, data, cache, tmp_path):
        self.folder = tmp_path / "index" / "files"
        write_rows(table_of_texts(0, 50), data / "a.jsonl")
        write_rows(table_of_texts(50), data / "b.jsonl")
        (tmp_path / "secret.jsonl").write_bytes((data / "a.jsonl").read_bytes())
        os.utime(tmp_path / "secret.jsonl", ns=(0, 0))
        return indexed(files_config(str(data), cache), tmp_path / "index")

    @pytest.mark.parametrize(
        ("columns", "reason"),
        [
            ({"name": ["b.jsonl", "a.jsonl"]}, "not in order"),
            ({"name": ["a.jsonl", "a.jsonl"]}, "not in order"),
            ({"size_bytes": [-1, 5]}, "a size"),
            ({"runs": [[-50], [40]]}, "a size"),
            ({"runs": [[], [40]]}, "a size"),
            ({"runs": [[1 << 60], [40]]}, "more rows"),
            ({"runs": [[1 << 62, 1 << 62], [40]]}, "more rows"),
            ({"runs": [[0, 0], [40]]}, "without rows"),
            ({"runs": [[1 << 35], [40]], "size_bytes": [1 << 40, 5]}, "more rows"),
            ({"contents": [[None], None]}, "a hash, is missing"),
            ({"num_starts": [-1, 5]}, "number of starts"),
            ({"num_starts": [1 << 61, 1 << 61]}, "number of starts"),
            ({"num_starts": [51, 1000], "runs": [[50], [999]]}, "bytes, not"),
            ({"num_starts": [51, 1000]}, "than starts"),
            ({"runs": [[51], [40]]}, "than starts"),
            ({"runs": [[25, 25], [40]]}, "than starts"),
            ({"held_bytes": [-1, 5]}, "number of starts"),
        ],
    )
    def test_what_cannot_be_is_refused_at_the_start(self, config, columns, reason):
        forge(self.folder, **columns)
        with pytest.raises(DataError, match=rf"(?s)the index is damaged.*{reason}.*hfdist index"):
            open_corpus(config)

    @pytest.mark.parametrize(
        ("place", "name"),
        [
            *((place, place) for place in ("../secret.jsonl", "/etc/hosts", "x/../../secret.jsonl", "a\0.jsonl")),
            ("b.jsonl", "a.jsonl"),
        ],
    )
    def test_no_name_leads_out_of_the_source(self, config, place, name):
        forge(self.folder, place=[place, "y.jsonl"], name=[name, "y.jsonl"])
        with pytest.raises(DataError, match="a file outside the source"):
            open_corpus(config).text(0)

    @pytest.mark.parametrize("place", ["../secret.jsonl", "/etc/hosts", "%2e%2e/secret.jsonl", "a\n"])
    def test_no_name_leads_out_of_a_store(self, config, web, place):
        forge(self.folder, place=[place, "b.jsonl"])
        source = replace(config.sources["files"], path=f"{web.url}/texts/")
        with pytest.raises(DataError, match="a file outside the source"):
            open_corpus(replace(config, sources={"files": source})).text(0)
        assert not web.requests

    @pytest.mark.parametrize("starts", ["negative", "falling", "beyond"])
    def test_places_of_rows_stay_in_the_file(self, config, data, starts):
        values = np.fromfile(self.folder / STARTS, "<i8")
        values[[0, 3, 50]] = {
            "negative": (-5, values[3], values[50]),
            "falling": (0, 1 << 40, values[50]),
            "beyond": (0, values[3], 1 << 40),
        }[starts]
        values.tofile(self.folder / STARTS)
        with pytest.raises(DataError, match=r"a\.jsonl: another hash"):
            open_corpus(config).text(0)
        forge(self.folder, starts_hash=[hash_of(values[:51]), hash_of(values[51:])])
        with pytest.raises(DataError, match=r"a\.jsonl: (the starts of its rows|rows after its end)"):
            open_corpus(config).text(0)
        assert open_corpus(config).text(50) == texts()[50]

    def test_a_table_with_other_row_groups_than_its_file(self, data, cache, tmp_path):
        for path in data.iterdir():
            path.unlink()
        config = indexed(files_config(WRITERS["parquet"](data), cache), tmp_path / "tables")
        self.folder = tmp_path / "tables" / "files"
        values = np.fromfile(self.folder / STARTS, "<i8")
        first, second = values[:3], values[3:]
        forge(self.folder, runs=[[10, 20, 20], [17, 17, 6]], starts_hash=[hash_of(first), hash_of(second)])
        corpus = open_corpus(config)
        with pytest.raises(DataError, match="the index of the source describes another file"):
            corpus.text(0)
        assert corpus.text(50) == texts()[50]

    @pytest.mark.parametrize("name", [FILES, SUMMARY, STARTS])
    def test_damage_is_told(self, config, name):
        for content in (b"", b"\0" * 100, (self.folder / name).read_bytes()[:-7], b"[" * 100_000):
            (self.folder / name).write_bytes(content)
            with pytest.raises(DataError, match=r"(?s)the index is.*hfdist index"):
                open_corpus(config)

    @pytest.mark.parametrize("codec", ["zstd", "lz4"])
    def test_columns_that_would_be_unpacked_are_refused_before(self, config, monkeypatch, codec):
        summary = read_summary(self.folder / SUMMARY)
        batch = read_files(self.folder / FILES, summary.files_hash)
        packed = pa.BufferOutputStream()
        with pa.ipc.new_file(packed, batch.schema, options=pa.ipc.IpcWriteOptions(compression=codec)) as writer:
            writer.write_batch(batch)
        content = packed.getvalue().to_pybytes()
        del batch
        (self.folder / FILES).write_bytes(content)
        write_summary(self.folder / SUMMARY, replace(summary, files_hash=xxhash.xxh3_128(content).hexdigest()))
        monkeypatch.setattr(pa.ipc, "read_record_batch", None)
        with pytest.raises(DataError, match=r"(?s)the index is damaged.*compressed"):
            open_corpus(config)

    def test_bytes_of_the_rows_are_no_index_of_another_kind(self, config):
        content = (self.folder / FILES).read_bytes()
        summary = read_summary(self.folder / SUMMARY)
        for place in range(0, len(content), 61):
            wrong = bytearray(content)
            wrong[place] ^= 0xFF
            (self.folder / FILES).write_bytes(wrong)
            write_summary(self.folder / SUMMARY, replace(summary, files_hash=xxhash.xxh3_128(wrong).hexdigest()))
            try:
                corpus = open_corpus(config)
                list(corpus.inventory._entries())
                corpus.text(0)
            except DataError:
                pass

    def test_other_columns_another_version_and_none(self, config):
        other = replace(config, sources={"files": replace(config.sources["files"], text="id")})
        with pytest.raises(ConfigError, match=r"(?s)for other columns.*found: +text.*id.*hfdist index"):
            open_corpus(other)
        values = json.loads((self.folder / SUMMARY).read_bytes())
        (self.folder / SUMMARY).write_text(json.dumps(values | {"version": 9}))
        with pytest.raises(DataError, match=r"(?s)another version.*version 9"):
            open_corpus(config)
        source = replace(config.sources["files"], index=str(self.folder.parent))
        with pytest.raises(ConfigError) as caught:
            open_corpus(replace(config, sources={"files": source}))
        assert caught.value.hint == f"data.sources.files.index={self.folder}"
        (self.folder / SUMMARY).unlink()
        with pytest.raises(ConfigError, match=r"(?s)no finished index.*hfdist index"):
            open_corpus(config)


def test_json_lines_that_are_too_many_ask_for_an_index_first(data, cache, tmp_path, monkeypatch):
    monkeypatch.setattr(find, "_MOST_LINES_BYTES", 1000)
    (data / "rows.jsonl").write_bytes(jsonl_bytes())
    config = files_config(str(data), cache)
    with pytest.raises(
        DataError, match=r"(?s)hfdist index.*data\.sources\.files\.index=runs/NAME/index/files.*pretokenize"
    ):
        open_corpus(config)
    with pytest.raises(DataError, match=r"hfdist index data\.format=auto once"):
        open_corpus(replace(config, format=RowFormat.auto))
    assert open_corpus(indexed(config, tmp_path)).num_documents == len(texts())
    assert open_corpus(config, reads_all=True).num_documents == len(texts())


TASKS = [("finetune", []), ("tune", ["task=dpo"]), ("tune", ["task=kto"]), ("tune", ["task=reward"])]
PROMPTS = ["task=grpo", "task.reward_model=a", "task.rewards={reward_model: 1}"]


@pytest.mark.parametrize(
    ("primary", "overrides"), [*TASKS, ("tune", PROMPTS), ("tune", [*PROMPTS, "data.format=prompt"])]
)
def test_the_command_of_the_hint_makes_an_index_of_the_same_rows(data, tmp_path, primary, overrides):
    """The hint's command line composes what `hfdist index` reads; a source without an index gives the hint."""
    given = ["model=tiny", "data=files", f"data.sources.files.path={data}", *overrides]
    config = compose_config([*given, f"data.sources.files.index={tmp_path}"], name=primary).data
    with pytest.raises(ConfigError, match="no finished index") as caught:
        open_corpus(config)
    options = caught.value.hint.partition(" with the same overrides")[0].split()[2:]
    name = next((one.partition("=")[2] for one in options if one.startswith("--config-name=")), "pretrain")
    index = compose_config([*given, *(one for one in options if one[0] != "-")], name=name).data
    keys = [RowReader.of(one.sources["files"], one, "data.sources.files").key for one in (index, config)]
    assert keys[0] == keys[1]


def test_rows_with_columns_that_rewards_read_are_held_by_their_whole_size(data, cache, tmp_path):
    rows = {"prompt": ["a"] * 300, "completion": ["b"] * 300, "image": [f"{row:040000}" for row in range(300)]}
    pq.write_table(pa.table(rows), data / "rows.parquet")
    config = files_config(str(data), cache, format=RowFormat.auto)
    kept = replace(indexed(config, tmp_path), keep_columns=True)
    plain = open_corpus(replace(config, keep_columns=True))
    assert open_corpus(kept).shards[0][1].rows_at_once == plain.shards[0][1].rows_at_once < 300


def test_a_name_that_is_not_utf_8_is_told_before_anything_is_read(data, cache, tmp_path, monkeypatch):
    (data / "rows.jsonl").write_bytes(jsonl_bytes())
    (data / os.fsdecode(b"b\xff.jsonl")).write_bytes(jsonl_bytes() + b'{"text": "more"}\n')
    config = files_config(str(data), cache)
    assert open_corpus(config).num_documents == 2 * len(texts()) + 1
    monkeypatch.setattr("hfdist.data.index.read_at_a_start", None)
    with pytest.raises(DataError, match=r"(?s)file names in UTF-8.*b\\udcff\.jsonl.*rename"):
        index_sources(config, tmp_path)


def test_held_out_sources_have_an_index_of_their_own(data, cache, tmp_path):
    (data / "rows.jsonl").write_bytes(jsonl_bytes())
    (tmp_path / "held_out.jsonl").write_bytes(jsonl_bytes() + b'{"text": "more"}\n')
    held_out = SourceConfig(kind=SourceKind.files, path=str(tmp_path / "held_out.jsonl"))
    config = files_config(str(data), cache, eval_sources={"files": replace(held_out, index=str(tmp_path / "index"))})
    of_eval = {"sources": config.eval_sources, "eval_sources": {}}
    with pytest.raises(ConfigError, match=r"no finished index") as caught:
        open_corpus(replace(config, **of_eval), section="data.eval_sources")
    assert caught.value.hint.endswith("data.eval_sources.files.index=runs/NAME/index/eval_sources/files")
    for _ in range(2):  # the second time it compares
        index_sources(config, tmp_path / "index")
    config.eval_sources["files"].index = str(tmp_path / "index" / "eval_sources" / "files")
    assert open_corpus(replace(config, **of_eval), section="data.eval_sources").num_documents == len(texts()) + 1
    assert open_corpus(over(config, tmp_path / "index")).num_documents == len(texts())


def test_only_files_are_indexed(tmp_path):
    with pytest.raises(ConfigError, match="only files are indexed"):
        index_sources(DataConfig(sources={"a": SourceConfig(kind=SourceKind.stdlib)}), tmp_path)
