"""What files hold is compared where a run goes on: an edit of equal size stops it, with the file and its rows."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace

import datasets
import pyarrow as pa
import pytest

from hfdist.config.data import BadRows, DataConfig, RowFormat, SourceConfig, SourceKind
from hfdist.data import open_corpus
from hfdist.data.documents.inventory import _read_entries
from hfdist.data.pretokenize import pretokenize
from hfdist.data.sources.shards import OpenShards, ShardFacts
from hfdist.data.storage import identity
from hfdist.data.stream.ledger import Ledger
from hfdist.errors import CheckpointError
from tests.unit.data.corpora import files_config, tokenizer, write_rows
from tests.unit.data.streams import Run, memory_config, memory_corpus

ROWS = [f"{number:05d} " + "lorem ipsum " * 25 for number in range(2000)]
EDITED = 1050


def test_files_are_counted_as_they_are_read(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    for folder, num_files in ((before, 12), (after, 21)):
        folder.mkdir()
        for number in range(num_files):
            (folder / f"{number}.txt").write_text("text\n")
    noted, now = (open_corpus(files_config(str(folder), tmp_path / "cache")).inventory for folder in (before, after))
    noted.write(tmp_path)
    changes = now.changes_since(noted.digest, tmp_path)
    assert changes[-1] == "and 1 more file"


def test_of_many_changes_only_those_that_are_shown_are_looked_into(tmp_path, monkeypatch):
    inventories = []
    for text in ("one\n", "two\n"):
        for number in range(12):
            (tmp_path / f"{number:02d}.txt").write_text(text)
        inventories.append(open_corpus(files_config(str(tmp_path), tmp_path / "cache")).inventory)
    before, now = inventories
    asked, opened, facts, open_one = [], [], OpenShards.facts, OpenShards.open
    monkeypatch.setattr(OpenShards, "facts", lambda self: asked.append(self) or facts(self))
    monkeypatch.setattr(OpenShards, "open", lambda self, number: opened.append(number) or open_one(self, number))
    changes = now.changes_from(before)
    assert [changes[0], changes[7], changes[8]] == ["files:00.txt, row 0", "files:07.txt, row 0", "and 4 more files"]
    assert (len(asked), opened) == (2, [*range(8)])


def test_rows_are_taken_out_without_a_look_at_each_file(tmp_path, monkeypatch):
    for number in range(12):
        (tmp_path / f"{number:02d}.txt").write_text("text\n")
    rows = [f"files:{number:02d}.txt:0" for number in range(12)]
    made, of = [], ShardFacts.of
    monkeypatch.setattr(ShardFacts, "of", lambda shard: made.append(shard.name) or of(shard))
    config = files_config(str(tmp_path), tmp_path / "cache")
    open_corpus(config)
    plain = len(made)
    assert open_corpus(replace(config, quarantine=rows)).quarantined == {*range(12)}
    assert len(made) == 2 * plain


def rows_with(text):
    return [*ROWS[:EDITED], text, *ROWS[EDITED + 1 :]]


def write_as(kind, **options):
    def write(folder, rows):
        return write_rows(pa.table({"text": rows}), folder / f"rows.{kind}", 100, **options)

    return write


write_jsonl = write_as("jsonl")


def write_txt(folder, rows):
    for number in range(0, len(rows), 100):
        (folder / f"{number:05d}.txt").write_text("\n".join(rows[number : number + 100]))
    return folder / "01000.txt"


def write_tokens(folder, rows):
    source = folder.parent / "source"
    source.mkdir(exist_ok=True)
    config = files_config(str(write_jsonl(source, rows)), folder.parent / "cache")
    pretokenize(open_corpus(config).shards, tokenizer(), folder, workers=0, on_bad_rows=BadRows.error)
    return folder / "00000.tokens"


# With the row that is named; of several rows, the first and the last.
WRITERS = {
    "jsonl": (write_jsonl, r"10\d\d to 10\d\d"),
    "parquet": (write_as("parquet", compression="none", use_dictionary=False), "1000 to 1099"),
    "arrow": (write_as("arrow"), "1000 to 1099"),
    "txt": (write_txt, "0"),
    "tokens": (write_tokens, r"\d+ to 10\d\d"),
}


def edit_in_the_middle(path, *, keeps_times):
    """Change one letter of the row in the middle, or one token; the size stays, and so may the times."""
    before, content = path.stat(), bytearray(path.read_bytes())
    place = content.index(b"01050 lorem") + 6 if path.suffix != ".tokens" else len(content) // 2
    content[place] ^= 1
    path.write_bytes(content)
    assert path.stat().st_size == before.st_size
    if keeps_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def config_of(kind, folder, cache, **settings):
    config = files_config(str(folder), cache, **settings)
    if kind == "tokens":
        config.sources = {"files": SourceConfig(kind=SourceKind.tokens, path=str(folder))}
    return config


def ledger_of(tmp_path, corpus):
    return lambda: Ledger(tmp_path / "ledger", corpus, BadRows.error)


def begin(tmp_path, kind="jsonl"):
    """A run over one kind of file: the file to edit, the config, and the run."""
    folder = tmp_path / "data"
    folder.mkdir()
    path = WRITERS[kind][0](folder, ROWS)
    config = config_of(kind, folder, tmp_path / "cache")
    corpus = open_corpus(config)
    return path, config, Run(corpus, config, 1, ledger=ledger_of(tmp_path, corpus))


@pytest.fixture(autouse=True)
def files_that_were_just_written_count_as_old(monkeypatch):
    """So that what a first start has found is kept, as it would be a few seconds later."""
    monkeypatch.setattr(identity, "_RECENT_NS", 0)


@pytest.mark.parametrize(("kind", "keeps_times"), [("jsonl", False), *((kind, True) for kind in WRITERS)])
def test_an_edit_of_equal_size_stops_a_run_that_goes_on_and_names_the_rows(tmp_path, kind, keeps_times):
    rows = WRITERS[kind][1]
    path, config, run = begin(tmp_path, kind)
    run.step()
    run.flush()
    state = run.state()

    shutil.copytree(tmp_path / "data", tmp_path / "moved")
    elsewhere = open_corpus(config_of(kind, tmp_path / "moved", tmp_path / "cache"))
    Run(elsewhere, config, 1, state, ledger=ledger_of(tmp_path, elsewhere))

    edit_in_the_middle(path, keeps_times=keeps_times)
    corpus = open_corpus(config)
    name = path.stem if kind == "tokens" else path.name
    with pytest.raises(CheckpointError, match=rf"(?s)files have changed since.*:{name}, rows? {rows}\n.*allow_changes"):
        Run(corpus, config, 1, state, ledger=ledger_of(tmp_path, corpus))
    # A new run reads what is there now, and not what this machine had kept of it.
    assert kind == "tokens" or ROWS[EDITED] not in corpus.text(10 if kind == "txt" else EDITED)


def test_an_accepted_edit_goes_on_from_the_same_place_and_is_named_once(tmp_path, caplog):
    path, config, run = begin(tmp_path)
    run.step()
    run.flush()
    edit_in_the_middle(path, keeps_times=True)
    corpus = open_corpus(config)
    stream = Run(corpus, config, 1).streams[0]
    stream.may_begin_anew = True
    stream.load_state_dict(run.state(), ledger=tmp_path / "ledger")
    assert "files:rows.jsonl, rows" in caplog.text
    caplog.clear()
    assert stream.state_dict()["places"] == run.state()["places"]
    stream.ledger = Ledger(tmp_path / "ledger", corpus, BadRows.error)
    stream.ledger.flush()
    stream.load_state_dict(stream.state_dict())
    assert not caplog.text


def test_what_is_too_large_to_be_read_at_a_start_is_named(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hfdist.data.sources.find.MOST_BYTES", 1000)
    path, config, run = begin(tmp_path)
    run.flush()
    Run(open_corpus(config), config, 1, run.state(), ledger=ledger_of(tmp_path, open_corpus(config)))
    assert not caplog.text
    edit_in_the_middle(path, keeps_times=False)
    Run(open_corpus(config), config, 1, run.state(), ledger=ledger_of(tmp_path, open_corpus(config)))
    assert "too large to be compared: of 1 files, files:rows.jsonl among them" in caplog.text


def test_rows_of_a_dataset_are_compared_whatever_its_chunks(tmp_path):
    chats = [[{"role": "user", "content": row[:40]}, {"role": "assistant", "content": "yes"}] for row in ROWS]
    columns = {"text": ROWS, "n": list(range(len(ROWS)))}

    def inventory(dataset, **source):
        sources = DataConfig(sources={"x": SourceConfig(path="memory", **source)}, lanes=12, cache_dir=str(tmp_path))
        return open_corpus(sources, {"x": dataset}).inventory

    whole = datasets.Dataset.from_dict(columns)
    parts = datasets.concatenate_datasets([whole.select(range(7)), whole.select(range(7, len(ROWS)))])
    assert inventory(whole).digest == inventory(parts).digest
    edited = datasets.Dataset.from_dict({**columns, "text": rows_with("x" * len(ROWS[EDITED]))})
    inventory(whole).write(tmp_path)
    assert inventory(edited).changes_since(inventory(whole).digest, tmp_path) == ["x:x, rows 1040 to 1055"]
    talk = datasets.Dataset.from_dict({"messages": chats})
    chats[EDITED][1]["content"] = "no!"
    other = datasets.Dataset.from_dict({"messages": chats})
    assert inventory(talk, format=RowFormat.messages).digest != inventory(other, format=RowFormat.messages).digest


def test_a_dataset_in_files_is_hashed_once_and_again_where_a_file_was_edited(tmp_path, monkeypatch):
    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(str(tmp_path / "saved"))
    config = DataConfig(
        sources={"x": SourceConfig(kind=SourceKind.hub, path=str(tmp_path / "saved"))},
        lanes=12,
        cache_dir=str(tmp_path / "cache"),
    )
    first = open_corpus(config).inventory
    first.write(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("hfdist.data.sources.dataset.hash_table", lambda part: pytest.fail("hashed once more"))
        assert open_corpus(config).inventory.digest == first.digest
    edit_in_the_middle(*(tmp_path / "saved").glob("*.arrow"), keeps_times=True)
    (change,) = open_corpus(config).inventory.changes_since(first.digest, tmp_path)
    assert change.endswith(", rows 1040 to 1055")


def test_a_damaged_note_is_no_traceback(tmp_path):
    config = memory_config(tmp_path)
    inventory = memory_corpus(config).inventory
    inventory.write(tmp_path)
    (path,) = tmp_path.glob("files-*.jsonl")
    assert [entry.rows for entry in _read_entries(tmp_path, inventory.digest)] == [60, 30]
    whole = path.read_bytes()
    assert b'"parts": "' in whole
    for damaged in (whole[:-20], whole.replace(b'"parts": "', b'"parts": "zz', 1)):
        path.write_bytes(damaged)
        assert _read_entries(tmp_path, inventory.digest) is None


def test_parts_are_few_and_cover_a_file():
    for size in (1, 4096, 4097, 4 << 20, (4 << 20) + 1, 10**12):
        assert -(-size // identity.part_bytes(size)) <= 1024
    assert identity.part_bytes(4 << 20) == 4096
