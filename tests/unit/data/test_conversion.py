"""A command that an error gives for files of other kinds, run as a user would, and what is read then."""

import bz2
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hfdist.data import open_corpus
from hfdist.errors import ConfigError
from tests.unit.data.test_examples import config_of

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Zwölf"}]
FILES = {
    "array.json": json.dumps([{"instruction": "Hi", "output": "Zwölf"}], indent=1, ensure_ascii=False),
    "lines.json": '{"instruction": "Hi", "output": "Zwölf"}\n{"instruction": "Hi", "output": "Zwölf"}\n',
    "of a spreadsheet.csv": '\ufeffinstruction,output,n\r\nHi,Zwölf,1\r\n"Hi",Zwölf,\r\n',
    "chats.json": f"{json.dumps({'messages': MESSAGES})}\n" * 2,
    "tabs.tsv": "instruction\toutput\nHi\tZwölf\n",
    "packed.jsonl.bz2": '{"instruction": "Hi", "output": "Zwölf"}\n',
    "packed.jsonl.xz": '{"instruction": "Hi", "output": "Zwölf"}\n',
}
PACKERS = {".bz2": bz2.compress, ".xz": lzma.compress}
EXPECTED = {"messages": MESSAGES}


NUM_ROWS = {"of a spreadsheet.csv": 2, "lines.json": 2, "chats.json": 2, "": 5, "*.json": 5}


def refusal(path, cache):
    with pytest.raises(ConfigError) as caught:
        open_corpus(config_of(path, cache))
    return caught.value.hint


@pytest.mark.parametrize("given", [*FILES, "", "*.json"])
def test_the_command_makes_files_that_are_read(given, tmp_path):
    folder = tmp_path / "my data"
    folder.mkdir()
    for name, text in FILES.items():
        if name.endswith(Path(given or "*.json").suffix):
            (folder / name).write_bytes(PACKERS.get(Path(name).suffix, bytes)(text.encode()))
    command, then = refusal(folder / given, tmp_path / "cache").split("; then ")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", command], check=True, env=environment)
    path = then.strip("'").removeprefix("data.sources.x.path=")
    corpus = open_corpus(config_of(path, tmp_path / "cache"))
    assert corpus.num_documents == NUM_ROWS.get(given, 1)
    assert all(json.loads(corpus.text(n)) == EXPECTED for n in range(corpus.num_documents))


def test_the_command_for_a_glob_leaves_other_files_alone(tmp_path, monkeypatch):
    (tmp_path / "others" / "below").mkdir(parents=True)
    for name in ("a 1.csv", "a 2.csv", "b.csv", "others/a 3.csv", "others/below/a 4.csv"):
        (tmp_path / name).write_text("instruction,output\nHi,Zwölf\n")
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (tmp_path / "others" / "b.jsonl").write_text('{"text": "of another kind"}\n')
    (tmp_path / "others" / "c.csv").write_text("instruction,output\nHi,Zwölf\n")
    for given, expected in {
        "others/*": ["others/a 3.csv.jsonl", "others/c.csv.jsonl"],
        "a *.csv": ["a 1.csv.jsonl", "a 2.csv.jsonl"],
        "others/**/[!b]*.csv": ["others/a 3.csv.jsonl", "others/below/a 4.csv.jsonl", "others/c.csv.jsonl"],
    }.items():
        command = refusal(given, tmp_path / "cache").split("; then ")[0]
        subprocess.run(["bash", "-c", command], check=True, env=environment)
        made = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.csv.jsonl"))
        assert made == expected
        for path in made:
            (tmp_path / path).unlink()


def test_plain_text_of_another_kind_is_copied_under_the_suffix_that_is_read(tmp_path):
    folder = tmp_path / "my notes"
    folder.mkdir()
    for name in ("one.md", "two.md"):
        (folder / name).write_text(f"text of {name}")
    command, then = refusal(folder, tmp_path / "cache").split("; then ")
    subprocess.run(["bash", "-c", command], check=True)
    corpus = open_corpus(config_of(then.strip("'").removeprefix("data.sources.x.path="), tmp_path / "cache"))
    assert sorted(corpus.text(number) for number in range(2)) == ["text of one.md", "text of two.md"]


def test_what_cannot_be_converted_is_said_without_a_command(tmp_path):
    for text in ('{\n"data": []}', '{"data": [{"text": "one"}]}'):
        (tmp_path / "one.json").write_text(text)
        assert refusal(tmp_path / "one.json", tmp_path / "cache") == (
            "rows as JSON objects, a line each, in a file NAME.jsonl, without an object or a list around them"
        )
    (tmp_path / "page.html").write_text("<p>")
    assert refusal(tmp_path / "page.html", tmp_path / "cache") is None
