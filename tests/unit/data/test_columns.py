"""Columns of any name: mapped by `data.columns`, one of several, nested, and guessed for the message."""

import gzip
import json
import shlex

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from hfdist.config.composition.compose import compose_config
from hfdist.config.data import COLUMNS, RowFormat
from hfdist.data.sources.asked_columns import AskedColumns
from hfdist.data.sources.base import ContentError
from hfdist.data.sources.columns import Column, Kind, guess_columns
from hfdist.data.sources.find import find_shards
from hfdist.data.sources.formats import FORMS, FORMS_BY_NAME, OTHER_NAMES
from hfdist.errors import ConfigError

ROWS = [{"question": f"{n} + 1 =", "meta": {"answer": f"{n + 1}", "raw": f"{n} and {n + 1}"}} for n in range(3)]


def write(folder, kind):
    """The same rows in each kind of file, and in a saved dataset."""
    if kind == "saved":
        Dataset.from_list(ROWS).save_to_disk(folder / kind)
        return ("data.sources.files.kind=hub", f"data.sources.files.path={folder / kind}")
    path = folder / f"rows.{kind}"
    match kind:
        case "jsonl" | "ndjson":
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case "jsonl.gz":
            path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode()))
        case "parquet":
            pq.write_table(pa.Table.from_pylist(ROWS), path)
        case "arrow":
            table = pa.Table.from_pylist(ROWS)
            with pa.ipc.new_stream(path, table.schema) as file:
                file.write_table(table)
    return (f"data.sources.files.path={path}",)


def read(folder, *overrides, name="finetune"):
    config = compose_config(["model=tiny", "data=files", *overrides], name=name)
    return [
        text
        for shard in find_shards("files", config.data, folder / "cache")
        for text in shard.read(range(sum(shard.runs)))
    ]


@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "jsonl.gz", "parquet", "arrow", "saved"])
@pytest.mark.parametrize("section", ["data", "data.sources.files"])
def test_rows_of_any_columns_become_examples(tmp_path, kind, section):
    found = read(tmp_path, *write(tmp_path, kind), f"{section}.columns={{prompt: question, completion: meta.answer}}")
    expected = [{"prompt": row["question"], "completion": row["meta"]["answer"]} for row in ROWS]
    assert [json.loads(text) for text in found] == expected


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "saved"])
def test_text_may_stand_within_a_column(tmp_path, kind):
    found = read(tmp_path, *write(tmp_path, kind), "data.sources.files.text=meta.raw", name="pretrain")
    assert found == [row["meta"]["raw"] for row in ROWS]


def test_each_file_may_have_another_text_column(tmp_path):
    for kind, column in (("jsonl", "content"), ("parquet", "raw_text")):
        rows = [{column: f"{kind} {n}", "id": n} for n in range(2)]
        if kind == "jsonl":
            (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    settings = (f"data.sources.files.path={tmp_path}", "data.sources.files.text=[content,raw_text]")
    assert read(tmp_path, *settings, name="pretrain") == ["jsonl 0", "jsonl 1", "parquet 0", "parquet 1"]


def test_rows_of_one_file_may_have_their_text_in_different_columns(tmp_path):
    """The hint names both."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"content": "b"}\n{"text": "c"}\n')
    place = f"data.sources.files.path={tmp_path / 'rows.jsonl'}"
    [first, bad, _] = read(tmp_path, place, name="pretrain")
    assert (first, bad.error.hint) == ("a", "'data.sources.files.text=[text,content]'")
    assert read(tmp_path, place, bad.error.hint.strip("'"), name="pretrain") == ["a", "b", "c"]


def test_a_line_that_is_no_json_is_told_before_the_columns_of_the_others(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"messages": [\n{"a": 1}\n{"a": 2}\n')
    with pytest.raises(ContentError, match="not JSON") as caught:
        read(tmp_path, f"data.sources.files.path={tmp_path / 'rows.jsonl'}")
    assert "row 0" in caught.value.where


def test_a_column_that_is_not_there_is_named(tmp_path):
    place = write(tmp_path, "parquet")
    with pytest.raises(ContentError, match=r"no column 'query' for prompt") as caught:
        read(tmp_path, *place, "data.columns={prompt: query, completion: meta.answer}")
    assert caught.value.allowed == "question, meta"
    assert "data.columns.prompt=question" in caught.value.hint
    assert (
        len(
            read(
                tmp_path,
                *place,
                "data.columns={prompt: query, completion: meta.answer}",
                "data.columns.prompt=question",
            )
        )
        == 3
    )
    with pytest.raises(ContentError, match=r"no column 'meta\.text'") as caught:
        read(tmp_path, *place, "data.sources.files.text=meta.text", name="pretrain")
    assert caught.value.allowed == "answer, raw"


@pytest.mark.parametrize(
    ("rows", "recipe", "settings", "hint"),
    [
        ({"question": "a", "answer": "b"}, "finetune", (), "'data.columns={prompt: question, completion: answer}'"),
        ({"prompt": "a", "answer": "b"}, "tune", ("task=grpo", "task.rewards={arithmetic: 1}"),
         "'data.columns={completion: answer}'"),
        ({"prompt": "a", "preferred": "b", "dispreferred": "c"}, "tune", ("task=dpo",),
         "'data.columns={chosen: preferred, rejected: dispreferred}'"),
        ({"instruction": "a", "context": "c", "response": "b"}, "finetune", (),
         "'data.columns={output: response, input: context}'"),
        ({"messages": []}, "pretrain", (), "hfdist finetune learns from conversations"),
        ({"messages": []}, "pretrain", (), "to index them: hfdist index data.format=auto"),
        ({"messages": []}, "tune", ("task=dpo",), "hfdist sft learns from such rows"),
        ({"prompt": "a", "level": 1}, "tune", ("task=grpo", "task.rewards={mine: 1}"), "data.format=prompt"),
    ],
)  # fmt: skip
def test_the_hint_follows_from_the_columns(tmp_path, rows, recipe, settings, hint):
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows) + "\n")
    settings = (f"data.sources.files.path={tmp_path / 'rows.jsonl'}", *settings)
    with pytest.raises(ContentError) as caught:
        read(tmp_path, *settings, name=recipe)
    assert hint in caught.value.hint
    if hint.startswith("'"):
        # It works when it is followed.
        (text,) = read(tmp_path, *settings, hint.partition("'")[2].partition("'")[0], name=recipe)
        assert isinstance(text, str)


@pytest.mark.parametrize(
    ("overrides", "where", "hint"),
    [
        (["data.columns={promt: question}"], "data.columns.promt", "data.columns.prompt=question"),
        (["data.columns={chosen: a}"], "data.columns.chosen", None),
        (["data.eval_fraction=0", "data.eval_sources.v={path: y, columns: {prompt: 5}}"],
         "data.eval_sources.v.columns.prompt", None),
        (["data.columns={prompt: 3}"], "data.columns.prompt", None),
        (["data.sources.files.columns={prompt: []}"], "data.sources.files.columns.prompt", None),
        (["data.sources.files.text=[]"], "data.sources.files.text", None),
        (["data.format=text", "data.columns={prompt: question}"], "data.columns.prompt", "data.format=auto"),
    ],
)  # fmt: skip
def test_mistakes_in_the_mapping_are_told_before_anything_is_read(overrides, where, hint):
    with pytest.raises(ConfigError) as caught:
        compose_config(["model=tiny", "data=files", "data.sources.files.path=x", *overrides], name="finetune")
    assert caught.value.where.startswith(where)
    assert hint is None or hint in caught.value.hint


def write_rows(folder, kind, rows):
    if kind == "jsonl":
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return f"data.sources.files.path={folder}/rows.{kind}"


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_list_takes_the_first_that_a_row_has(tmp_path, kind):
    rows = [{"prompt": "1", "answer": None, "response": "a"}, {"prompt": "2", "answer": "b", "response": "c"}]
    found = read(tmp_path, write_rows(tmp_path, kind, rows), "data.columns={completion: [answer, response]}")
    assert [json.loads(text)["completion"] for text in found] == ["a", "b"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("paths", ["[meta.a,meta.b]", "[meta.a,body]"])
def test_a_text_that_is_not_within_the_first_column_may_be_elsewhere(tmp_path, kind, paths):
    place = write_rows(tmp_path, kind, [{"meta": {"b": "text"}, "body": "text"}])
    assert read(tmp_path, place, f"data.sources.files.text={paths}", name="pretrain") == ["text"]


def test_who_names_a_column_means_a_format_that_has_it(tmp_path):
    row = {"instruction": "a", "input": "b", "output": "c", "messages": [{"role": "user", "content": "x"}]}
    place = write_rows(tmp_path, "jsonl", [row])
    (text,) = read(tmp_path, place, "data.columns={prompt: instruction, completion: output}")
    assert json.loads(text) == {"prompt": "a", "completion": "c"}


def test_a_source_may_have_other_columns_than_the_default(tmp_path):
    place = write_rows(tmp_path, "jsonl", [{"messages": [{"role": "user", "content": "x"},
                                                         {"role": "assistant", "content": "y"}]}])  # fmt: skip
    (text,) = read(tmp_path, place, "data.columns={prompt: question, completion: answer}")
    assert "messages" in json.loads(text)
    rows = write_rows(tmp_path, "parquet", [{"content": "own", "body": "default"}])
    assert read(tmp_path, rows, "data.columns={text: body}", "data.sources.files.text=content", name="pretrain") == [
        "own"
    ]


def test_columns_of_the_formats_are_those_that_are_read():
    for kind, names in COLUMNS.items():
        if kind not in (RowFormat.text, RowFormat.auto):
            forms = [FORMS_BY_NAME[kind], *OTHER_NAMES.get(kind, ())]
            assert set(names) == {name for form in forms for name in form.needed + form.optional}
    assert set(COLUMNS[RowFormat.auto]) == {"text", *(name for f in FORMS.values() for name in f.needed + f.optional)}


def test_a_column_whose_name_has_a_dot_is_found_first():
    assert Column.of("a.b").value({"a.b": 1, "a": {"b": 2}}) == 1
    assert Column.of(["x", "a.b"]).value({"a": {"b": 2}}) == 2
    assert Column.of("a.b").value({"a": 3}) is None


def test_a_guess_takes_no_column_twice():
    both = ("prompt", "completion")
    text = Kind.text
    assert guess_columns(both, (), {"Question": text, "answer": text}) == {"prompt": "Question", "completion": "answer"}
    assert guess_columns(both, (), {"input": text}) is None
    assert guess_columns(both, (), {"question": text, "answer": Kind.other}) is None
    assert guess_columns((*both, "label"), (), {"question": text, "answer": text, "liked": text}) is None
    three = dict.fromkeys(("question", "accepted", "rejected"), text)
    assert guess_columns(("chosen", "rejected"), ("prompt",), three) == {
        "chosen": "accepted",
        "prompt": "question",
    }


def test_messages_that_are_no_list_of_turns_are_no_prompt():
    asked = AskedColumns(format=RowFormat.prompt_completion)
    present = {"messages": Kind.other, "first": Kind.text, "second": Kind.text}
    hint = asked.error_without_format(present, "rows.jsonl").hint
    assert hint.startswith('rows such as {"prompt": messages[:-1]')
    with_turns = {"messages": Kind.turns, "second": Kind.text}
    hint = asked.error_without_format(with_turns, "rows.jsonl").hint
    assert hint.startswith("'data.columns={prompt: messages, completion: second}'")


@pytest.mark.parametrize(
    "names", [("question (en)", "answer: de"), ("the 'q'", "an, swer"), ('a "b"', "c"), ("ß", "$x")]
)
def test_a_hint_names_columns_so_that_the_shell_and_the_config_read_them(tmp_path, names):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(dict(zip(names, ("one", "two"), strict=True))) + "\n")
    place = f"data.sources.files.path={path}"
    with pytest.raises(ContentError) as caught:
        read(tmp_path, place)
    proposed = shlex.split(caught.value.hint)[0]
    assert json.loads(read(tmp_path, place, proposed)[0]) == {"prompt": "one", "completion": "two"}
    with pytest.raises(ContentError) as caught:
        read(tmp_path, place, "data.columns={prompt: promt, completion: cmpletion}")
    (proposed,) = shlex.split(caught.value.hint)
    config = compose_config(["model=tiny", "data=files", place, proposed], name="finetune")
    (column,) = config.data.columns.values()
    assert column in names
