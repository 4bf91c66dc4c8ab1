"""Token files hold the documents of the corpus in its order, survive interruption, and are checked before use."""

import json
import logging
import multiprocessing
import os
import shutil
import signal
import time

import numpy as np
import pytest
from filelock import FileLock
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from hfdist.config.data import BadRows, ChatConfig, SourceKind, TrainOn
from hfdist.data import open_corpus
from hfdist.data import pretokenize as pretokenize_file
from hfdist.data.pretokenize import pretokenize
from hfdist.data.sources.base import BadRow
from hfdist.data.sources.tokenfile import check_tokenizer, open_token_shards
from hfdist.data.tokenization.text_encoder import Encoder, text_digest, tokenizer_digest
from hfdist.errors import ConfigError, DataError, ResourceError
from hfdist.models.tokenizer import train_bpe
from tests.unit.data.corpora import files_config, texts, tokenizer

KEY = "data.sources.tokens.path"


def open_shards(folder):
    """With a cache of their own beside them."""
    return open_token_shards(str(folder), KEY, folder.parent / "cache")


class Texts:
    """A shard in memory: texts, or reasons why there is none."""

    def __init__(self, name, rows, *, runs=None, seconds=0.0):
        self.name = name
        self.identity = self.local_identity = f"identity of {name}"
        self.runs = runs or [len(rows)]
        self.rows_at_once, self.gives_examples, self.contents = 3, False, None
        self._rows, self._seconds = list(rows), seconds

    def read(self, rows):
        time.sleep(self._seconds)
        return [self._rows[row] for row in rows]


def corpus():
    """Large and small shards, several runs, an empty shard, and an empty text."""
    many = [f"{text}\n# {n}" for n in range(7) for text in texts()]
    return [
        ("a", Texts("large", many[:500], runs=[200, 1, 299])),
        ("a", Texts("small", ["", *many[500:530]], runs=[20, 11])),
        ("a", Texts("nothing", [], runs=[])),
        ("b", Texts("small", many[530:])),
    ]


def write(shards, folder, *, workers=0, on_bad_rows=BadRows.error, encoder=None, share=(0, 1)):
    how = {"workers": workers, "on_bad_rows": on_bad_rows, "share": share}
    return pretokenize(shards, encoder or tokenizer(), folder, **how)


def all_texts(shards):
    return [text for _, shard in shards for text in shard.read(range(sum(shard.runs)))]


def all_rows(opened):
    return [row for shard in opened for row in shard.read_tokens(range(sum(shard.runs)))] if opened else []


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".tokens", ".npy")}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder of token files, and what was said of it. Not to be changed."""
    folder = tmp_path_factory.mktemp("made") / "tokens"
    return folder, write(corpus(), folder, workers=2)


@pytest.fixture
def copied(made, tmp_path):
    """One that may be changed."""
    return shutil.copytree(made[0], tmp_path / "tokens")


def test_token_files_hold_the_documents_of_the_corpus_in_its_order(made):
    folder, said = made
    opened = open_shards(folder)
    wanted = all_texts(corpus())
    rows = all_rows(opened)
    for text, row, tokens in zip(wanted, rows, Encoder(tokenizer()).encode(wanted), strict=True):
        assert row.tokens.dtype == np.int32
        assert row.tokens.tolist() == tokens.tolist()
        assert row.text_digest == text_digest(text)
    # In the same runs too, on which the order of a stream rests.
    assert [n for shard in opened for n in shard.runs] == [n for _, shard in corpus() for n in shard.runs]
    counts = [(file.rows, file.tokens) for file in said.files]
    assert [*map(sum, zip(*counts, strict=True))] == [len(wanted), sum(len(row.tokens) for row in rows)]
    # Small shards share a file.
    assert sorted(contents(folder))[::3] == ["00000.digests.npy", "00001.digests.npy"]


def test_rows_are_given_as_asked_and_know_where_they_come_from(made):
    large, shared = open_shards(made[0])
    asked = [7, 5, 11, 6]
    every = large.read_tokens(range(20))
    assert [row.tokens.tolist() for row in large.read_tokens(asked)] == [every[n].tokens.tolist() for n in asked]
    assert large.read(asked) == corpus()[0][1].read(asked)
    assert shared.read([31, 0, 30]) == all_texts(corpus())[500:][31:32] + all_texts(corpus())[500::30][:2]
    assert [(origin.source, origin.shard, row) for origin, row in map(shared._record.origin, (0, 30, 31))] == [
        ("a", "small", 0),
        ("a", "small", 30),
        ("b", "small", 0),
    ]
    assert shared.identity != large.identity


def test_the_number_of_workers_changes_nothing(made, tmp_path):
    write(corpus(), tmp_path / "alone")
    assert contents(tmp_path / "alone") == contents(made[0])


def test_a_large_vocabulary_takes_32_bits(tmp_path):
    words = Tokenizer(WordLevel({f"w{n}": n for n in range(70_000)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    large = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1")
    write([("a", Texts("rows", ["w69999 w2", "w65536"]))], tmp_path, encoder=large)
    (opened,) = open_shards(tmp_path)
    assert [row.tokens.tolist() for row in opened.read_tokens([0, 1])] == [[69999, 2, 1], [65536, 1]]
    assert opened.read([1, 0]) == ["w65536", "w69999 w2"]


def run_and_say(folder):
    shards = [("a", Texts(f"shard {n}", texts()[:45] * 3, seconds=0.01)) for n in range(8)]
    write(shards, folder)


def test_what_was_killed_goes_on_where_it_stopped(tmp_path):
    fork = multiprocessing.get_context("fork")
    folder = tmp_path / "tokens"
    worker = fork.Process(target=run_and_say, args=(folder,))
    worker.start()
    while not (folder / "00001.json").is_file():
        assert worker.is_alive()
        time.sleep(0.002)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    with pytest.raises(DataError, match="not finished") as caught:
        open_shards(folder)
    assert "pretokenize" in caught.value.hint
    # One of them is spoilt: it is written again, the other is kept.
    (folder / "00001.tokens").write_bytes(b"")
    kept = (folder / "00000.tokens").stat().st_mtime_ns
    run_and_say(folder)
    assert (folder / "00000.tokens").stat().st_mtime_ns == kept
    run_and_say(tmp_path / "whole")
    assert contents(folder) == contents(tmp_path / "whole")
    assert (folder / "meta.json").read_bytes() == (tmp_path / "whole" / "meta.json").read_bytes()
    assert not [path.name for path in folder.iterdir() if path.suffix in (".json", ".tmp")][1:]


def everything(folder):
    return {
        path.relative_to(folder): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".lock")
    }


def five_files():
    return [("a", Texts(f"shard {n}", [text[:40] for text in texts()[n : n + 45]] * 3)) for n in range(3)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What one process makes of `five_files`."""
    folder = tmp_path_factory.mktemp("whole") / "tokens"
    write(five_files(), folder)
    return everything(folder)


class TestShares:
    @pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
    def test_they_are_the_bytes_of_one_process_whoever_comes_last(self, whole, tmp_path, order):
        said = [write(five_files(), tmp_path, share=(number, 4)) for number in order]
        # Of three files, the fourth has none.
        last = max(order.index(number) for number in range(3))
        assert said[:last] == [None] * last
        assert [len(one.files) for one in said[last:]] == [3] * (4 - last)
        assert everything(tmp_path) == whole
        assert write(five_files(), tmp_path, share=(order[0], 4)) == said[3]

    def test_killed_at_any_write_they_lose_a_file_at_most(self, whole, tmp_path):
        for kill_at in range(40):
            folder = tmp_path / str(kill_at)
            write(five_files(), folder, share=(1, 2))
            kept = {path: path.stat().st_mtime_ns for path in folder.glob("*.tokens")}
            worker = multiprocessing.get_context("fork").Process(target=self.write_and_die, args=(folder, kill_at))
            worker.start()
            worker.join()
            done = len([*folder.glob("*.json")])
            write(five_files(), folder, share=(0, 2))
            assert everything(folder) == whole
            assert {path: path.stat().st_mtime_ns for path in kept} == kept
            if worker.exitcode == 0:
                break
            assert worker.exitcode == -signal.SIGKILL
            assert done >= 1 + kill_at // 4 or (folder / "meta.json").is_file()
        # Two token files of four writes each, and the description.
        assert kill_at == 9

    def write_and_die(self, folder, kill_at):
        times = iter(range(kill_at + 1))

        def replace(source, target):
            if next(times) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            os.rename(source, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hfdist.atomic_write.os.replace", replace)
            write(five_files(), folder, share=(0, 2))

    def test_another_tokenizer_or_version_is_refused_with_what_differs(self, whole, tmp_path, monkeypatch):
        write(five_files(), tmp_path, share=(0, 2), encoder=train_bpe(texts(), 300))
        with pytest.raises(DataError, match=r"(?s)another share.*00000.*other: tokenizer\n.*same overrides"):
            write(five_files(), tmp_path, share=(1, 2))
        record = tmp_path / "00000.json"
        kept = record.read_bytes()
        record.write_bytes(b"[]")
        with pytest.raises(DataError, match=r"(?s)another share.*other: version"):
            write(five_files(), tmp_path, share=(1, 2))
        record.write_bytes(kept)
        with monkeypatch.context() as patch:
            patch.setattr("hfdist.data.pretokenize.VERSION", 9)
            with pytest.raises(DataError, match=r"(?s)another share.*other: version"):
                write(five_files(), tmp_path, share=(0, 2))
        # Those that differ again.
        write(five_files(), tmp_path, share=(0, 2))
        write(five_files(), tmp_path, share=(1, 2))
        assert everything(tmp_path) == whole

    def test_a_share_that_saw_other_files_is_refused(self, tmp_path):
        other = five_files()
        other[0][1].identity = "of another file"
        write(other, tmp_path, share=(0, 2))
        with pytest.raises(DataError, match=r"(?s)another share.*other: names or sizes"):
            write(five_files(), tmp_path, share=(1, 2))

    def test_one_share_is_for_one_process(self, tmp_path):
        with FileLock(tmp_path / ".lock-1-of-2"):
            write(five_files(), tmp_path, share=(0, 2))
            with pytest.raises(ConfigError, match=r"(?s)another process writes.*data\.shard of its own"):
                write(five_files(), tmp_path, share=(1, 2))

    def test_nor_is_a_file_that_shares_of_another_number_have(self, whole, tmp_path, monkeypatch):
        """Else they would delete what the other has not finished."""
        write_one, met = pretokenize_file._write, []

        def write_and_meet(path, content):
            monkeypatch.setattr(pretokenize_file, "_write", write_one)

            def meet(out):
                with pytest.raises(ConfigError, match="another process writes") as caught:
                    write(five_files(), tmp_path, share=(0, 2))
                met.append(caught.value)
                content(out)

            write_one(path, meet)

        monkeypatch.setattr(pretokenize_file, "_write", write_and_meet)
        write(five_files(), tmp_path)
        assert len(met) == 1
        assert everything(tmp_path) == whole
        assert sorted(path.name for path in tmp_path.glob(".lock*")) == [".lock", ".lock-0-of-2", ".lock-end"]


def test_a_finished_folder_is_left_alone_and_kept_from_others(copied):
    before = contents(copied)
    times = {path: path.stat().st_mtime_ns for path in copied.rglob("*")}
    again = write(corpus(), copied)
    assert {path: path.stat().st_mtime_ns for path in copied.rglob("*")} == times
    assert sum(file.rows for file in again.files) == len(all_texts(corpus()))
    with pytest.raises(ConfigError, match=r"(?s)another corpus.*the same files, tokenizer and data\.chat"):
        write(corpus()[1:], copied)
    with pytest.raises(ConfigError, match="another corpus"):
        write(corpus()[1:], copied, share=(1, 2))
    with pytest.raises(ConfigError, match=r"tokens of another tokenizer\n"):
        write(corpus(), copied, encoder=train_bpe(texts(), 300))
    with pytest.raises(ConfigError, match="tokens of another tokenizer and another corpus"):
        write(corpus()[1:], copied, encoder=train_bpe(texts(), 300))
    assert contents(copied) == before


def test_a_folder_of_examples_is_refused_with_what_differs(tmp_path):
    def examples(gives_examples=True):
        shard = Texts("chats", [json.dumps({"messages": [{"role": "user", "content": text[:40]},
                                                         {"role": "assistant", "content": "yes"}]})
                                for text in texts()[:3]])  # fmt: skip
        shard.gives_examples = gives_examples
        return [("a", shard)]

    def write_chats(folder, *, size=512, share=(0, 1), shards=None, **chat):
        encoder = train_bpe(texts(), size)
        encoder.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        how = {"workers": 0, "on_bad_rows": BadRows.error, "chat": ChatConfig(**chat), "share": share}
        return pretokenize(shards or examples(), encoder, folder, **how)

    assert write_chats(tmp_path, train_on=TrainOn.all) == write_chats(tmp_path, train_on=TrainOn.all)
    for others, name in (
        ({}, r"data\.chat or chat template"),
        ({"train_on": TrainOn.all, "size": 300}, "tokenizer"),
        ({"train_on": TrainOn.all, "shards": examples(False)}, r"data\.format"),
    ):
        with pytest.raises(ConfigError, match=rf"tokens of another {name}\n"):
            write_chats(tmp_path, **others)


def bad_rows():
    reason = DataError("not UTF-8", where="part-0, row 1")
    return [("a", Texts("part-0", ["one", BadRow(reason), "three"])), ("b", Texts("part-1", [BadRow(reason), "two"]))]


def test_bad_rows_stop_it(tmp_path):
    with pytest.raises(DataError, match="not UTF-8") as caught:
        write(bad_rows(), tmp_path, workers=1)
    assert caught.value.where == "part-0, row 1"
    assert "data.on_bad_rows=skip" in caught.value.hint


def test_or_become_empty_documents(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        said = write(bad_rows(), tmp_path, on_bad_rows=BadRows.skip)
    (opened,) = open_shards(tmp_path)
    assert opened.read(range(5)) == ["one", "", "three", "", "two"]
    assert [len(row.tokens) for row in all_rows([opened])][1::2] == [0, 0]
    assert said.files[0].bad_rows == [1, 3]
    assert "part-0, row 1: not UTF-8" in caplog.text


class Deadly(Texts):
    """Reading it kills."""

    def read(self, rows):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_is_an_error(tmp_path):
    with pytest.raises(ResourceError):
        write([("a", Deadly("rows", ["x"]))], tmp_path, workers=1)


def test_tokens_are_not_tokenized_again(made, tmp_path):
    with pytest.raises(ConfigError, match="tokens already"):
        write([("tokens", shard) for shard in open_shards(made[0])], tmp_path)


def test_a_run_must_have_the_tokenizer_of_the_files(made):
    check_tokenizer(str(made[0]), tokenizer_digest(tokenizer()), "of examples")
    other = tokenizer_digest(train_bpe(texts(), 300))
    with pytest.raises(ConfigError, match="another tokenizer") as caught:
        check_tokenizer(str(made[0]), other, "of examples")
    assert other in caught.value.found
    assert tokenizer_digest(tokenizer()) in caught.value.allowed
    assert caught.value.hint == f"model.tokenizer.name={made[0]}/tokenizer"


def edit_meta(folder, edit):
    path = folder / "meta.json"
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


DAMAGE = {
    "no meta": (lambda f: (f / "meta.json").unlink(), "meta.json"),
    "no JSON": (lambda f: (f / "meta.json").write_text("{"), "meta.json"),
    "nested JSON": (lambda f: (f / "meta.json").write_text("[" * 100_000), "meta.json"),
    "not ours": (lambda f: (f / "meta.json").write_text('{"version": 1}'), "meta.json"),
    "of the future": (lambda f: edit_meta(f, lambda m: m.update(version=2)), "meta.json"),
    "pickled": (lambda f: edit_meta(f, lambda m: m.update(dtype="object")), "meta.json"),
    "elsewhere": (lambda f: edit_meta(f, lambda m: m["files"][0].update(name="../../00000")), "meta.json"),
    "absolute": (lambda f: edit_meta(f, lambda m: m["files"][0].update(name="/etc/passwd")), "meta.json"),
    "negative": (lambda f: edit_meta(f, lambda m: m["files"][0].update(tokens=-1)), "meta.json"),
    "huge": (lambda f: edit_meta(f, lambda m: m["files"][0].update(tokens=10**15)), "00000.tokens"),
    "more rows": (lambda f: edit_meta(f, lambda m: m["files"][0].update(rows=501)), "meta.json"),
    "unknown key": (lambda f: edit_meta(f, lambda m: m["files"][1].update(code="x")), "meta.json"),
    "text for a number": (lambda f: edit_meta(f, lambda m: m["files"][1].update(bad_rows=["1"])), "meta.json"),
    "no tokens": (lambda f: (f / "00001.tokens").unlink(), "00001.tokens"),
    "cut off": (lambda f: os.truncate(f / "00000.tokens", 1000), "00000.tokens"),
    "cut index": (lambda f: os.truncate(f / "00001.index.npy", 200), "00001.index.npy"),
}


@pytest.mark.parametrize(("damage", "name"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_found_when_the_folder_is_opened(copied, damage, name):
    damage(copied)
    with pytest.raises(DataError) as caught:
        open_shards(copied)
    assert caught.value.where == str(copied / name)


@pytest.mark.parametrize(
    "array",
    [
        np.array([0, *[5] * 499, 10**12], dtype="<i8"),
        np.array([0, *range(500, 0, -1)], dtype="<i8"),
        np.zeros((501, 1), dtype="<i8"),
        np.zeros(501, dtype="<f8"),
    ],
    ids=["after the end", "backwards", "shape", "type"],
)
def test_a_damaged_index_is_found_when_it_is_read(copied, array):
    np.save(copied / "00000.index.npy", array)
    large, _ = open_shards(copied)
    with pytest.raises(DataError) as caught:
        large.read_tokens([1])
    assert caught.value.where == str(copied / "00000.index.npy")


def test_no_folder_names_the_key(tmp_path):
    with pytest.raises(ConfigError) as caught:
        open_shards(tmp_path / "nowhere")
    assert caught.value.where == KEY


def test_a_file_that_was_edited_since_an_interruption_is_tokenized_anew(tmp_path):
    """Also where size and ends are as before."""
    bad = BadRow(DataError("by the test"))
    shards = [("a", Texts("a", ["before"] * 300)), ("b", Texts("b", [bad] * 300))]
    shards[0][1].contents = np.array([1], dtype=np.uint64)
    with pytest.raises(DataError, match="by the test"):
        write(shards, tmp_path)
    edited = [("a", Texts("a", ["after"] * 300)), ("b", Texts("b", ["b"] * 300))]
    edited[0][1].contents = np.array([2], dtype=np.uint64)
    write(edited, tmp_path)
    assert open_shards(tmp_path)[0].read([0]) == ["after"]


def test_a_quarantined_document_of_a_token_file_is_not_drawn_for_the_held_out_set(tmp_path):
    """As in a run that reads the text."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()[:9]))
    few = {"eval_fraction": 1e-9, "lanes": 1}
    write(open_corpus(files_config(str(tmp_path / "rows.jsonl"), tmp_path, **few)).shards, tmp_path / "tokens")

    def held_out(kind, path, *quarantine):
        config = files_config(str(path), tmp_path, quarantine=list(quarantine), **few)
        config.sources["files"].kind = kind
        found = open_corpus(config)
        return [n for n, text in enumerate(texts()[:9]) if found.is_held_out(text_digest(text))]

    [first] = held_out(SourceKind.files, tmp_path / "rows.jsonl")
    assert held_out(SourceKind.tokens, tmp_path / "tokens") == [first]
    both = held_out(SourceKind.files, tmp_path / "rows.jsonl", f"files:rows.jsonl:{first}")
    assert len(both) == 2
    assert held_out(SourceKind.tokens, tmp_path / "tokens", f"files:00000:{first}") == both
    assert not held_out(SourceKind.tokens, tmp_path / "tokens", *(f"files:00000:{number}" for number in range(9)))
