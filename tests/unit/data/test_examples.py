"""Rows of every format, from every kind of file, become one canonical form; those of none are named."""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hfdist.config.data import BadRows, DataConfig, RowFormat, SourceConfig, SourceKind
from hfdist.data import open_corpus
from hfdist.data.sources.base import BadRow
from hfdist.data.sources.rows import RowReader
from hfdist.errors import DataError
from tests.unit.data.corpora import write_rows

USER, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}

# Rows, and what they become.
ROWS = {
    "messages": ({"messages": [USER, HELLO]}, {"messages": [USER, HELLO]}),
    "messages with tools": ({"messages": [USER, HELLO], "tools": [TOOL]}, {"messages": [USER, HELLO], "tools": [TOOL]}),
    "tools as JSON, without their envelope": (
        {"messages": [USER, HELLO], "tools": json.dumps([TOOL["function"]])},
        {"messages": [USER, HELLO], "tools": [TOOL]},
    ),
    "content in parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": [{"type": "text", "text": t} for t in ("Hel", "lo")]},
            ]
        },
        {"messages": [USER, HELLO]},
    ),
    "arguments as JSON": (
        {
            "messages": [
                USER,
                {**CALLED, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}]},
            ]
        },
        {"messages": [USER, CALLED]},
    ),
    "sharegpt": (
        {"system": "s", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"messages": [{"role": "system", "content": "s"}, USER, HELLO]},
    ),
    "sharegpt with a call": (
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "3"},
            ],
            "tools": json.dumps([TOOL]),
        },
        {"messages": [USER, CALLED, {"role": "tool", "content": "3"}], "tools": [TOOL]},
    ),
    "sharegpt with weights": (
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "bad", "weight": 0},
                {"from": "human", "value": "Hi", "weight": None},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}', "weight": 0},
                {"from": "gpt", "value": "Hello", "weight": 1.0},
            ]
        },
        {"messages": [USER, {"role": "assistant", "content": "bad", "weight": 0}, USER, CALLED | {"weight": 0}, HELLO]},
    ),
    "nulls of other rows": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": None, **CALL},
                        {"type": "function", "function": {"name": "f", "arguments": None}},
                    ],
                },
            ],
            "tools": [{"type": "function", "function": {"name": "add", "strict": None, "parameters": {"x": None}}}],
        },
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [CALL, {"type": "function", "function": {"name": "f", "arguments": {}}}],
                },
            ],
            "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}],
        },
    ),
    "alpaca": ({"instruction": "Hi", "input": "", "output": "Hello"}, {"messages": [USER, HELLO]}),
    "alpaca with input and system": (
        {"instruction": "Add.", "input": "1+2", "output": "3", "system": "s", "text": "all of it"},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "Add.\n1+2"},
                {"role": "assistant", "content": "3"},
            ]
        },
    ),
    "alpaca with history": (
        {"instruction": "Hi", "output": "Hello", "history": [["Hi", "Hello"]]},
        {"messages": [USER, HELLO, USER, HELLO], "learned_from": 3},
    ),
    "prompt": ({"prompt": '["a"]', "completion": "b"}, {"prompt": '["a"]', "completion": "b"}),
    "prompt of messages": ({"prompt": [USER], "completion": [HELLO]}, {"messages": [USER, HELLO], "learned_from": 1}),
    "an answer that is JSON": (
        {"prompt": [USER], "completion": '[{"id": 1}]'},
        {"messages": [USER, {"role": "assistant", "content": '[{"id": 1}]'}], "learned_from": 1},
    ),
    "text": ({"text": "some text"}, {"text": "some text"}),
}


def write(folder, kind, rows):
    """One file of a kind; gives its path."""
    if kind == "hub":
        datasets.Dataset.from_list(rows).save_to_disk(folder)
    else:
        write_rows(rows, folder / f"rows.{kind}", 3)
    return str(folder)


def config_of(folder, cache, kind="jsonl", *, format=RowFormat.auto, **settings):
    source = SourceConfig(kind=SourceKind.hub if kind == "hub" else SourceKind.files, path=str(folder))
    return DataConfig(sources={"x": source}, format=format, cache_dir=str(cache), lanes=1, **settings)


OTHERS = ("jsonl", "jsonl.gz", "jsonl.zst", "arrow", "hub")


# Every format from parquet, which has types, and from one other kind.
PAIRS = [*((case, "parquet") for case in ROWS), *((case, OTHERS[n % len(OTHERS)]) for n, case in enumerate(ROWS))]


@pytest.mark.parametrize(("case", "kind"), PAIRS)
def test_every_format_and_every_kind_of_file(case, kind, tmp_path, data):
    row, expected = ROWS[case]
    # A column that is not read, and of a type that JSON lacks where the file may have it.
    more = {"id": 7} if kind.startswith("jsonl") else {"id": b"\xff"}
    path = write(data, kind, [row | more] * 4)
    corpus = open_corpus(config_of(path, tmp_path, kind))
    assert corpus.num_documents == 4
    assert corpus.has_examples
    for number in range(4):
        assert json.loads(corpus.text(number)) == expected


@pytest.mark.parametrize("case", ["messages", "prompt"])
def test_texts_as_views_are_read(case, tmp_path, data):
    """Arrow of polars has them."""
    row, expected = ROWS[case]
    message = pa.struct([("role", pa.string_view()), ("content", pa.string_view())])
    kinds = {"messages": pa.list_(message)} if case == "messages" else dict.fromkeys(row, pa.string_view())
    path = write_rows(
        pa.table({name: pa.array([row[name]] * 4, kind) for name, kind in kinds.items()}), data / "a.feather"
    )
    corpus = open_corpus(config_of(str(path), tmp_path))
    assert [json.loads(corpus.text(number)) for number in range(4)] == [expected] * 4


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_of_several_formats_in_one_file(kind, tmp_path, data):
    cases = ["messages", "alpaca", "text", "prompt"]
    path = write(data, kind, [ROWS[case][0] for case in cases])
    if kind == "parquet":
        # Arrow gives a row all columns of the file, and takes them from the first.
        columns = dict.fromkeys(name for case in cases for name in ROWS[case][0])
        rows = [dict.fromkeys(columns) | ROWS[case][0] for case in cases]
        pq.write_table(pa.Table.from_pylist(rows), data / "rows.parquet")
    corpus = open_corpus(config_of(path, tmp_path))
    found = [json.loads(corpus.text(n)) for n in range(4)]
    assert found == [ROWS[case][1] for case in cases]


def test_a_named_format_reads_no_other(tmp_path, data):
    row = {"prompt": "a", "completion": "b", "text": "c"}
    path = write(data, "jsonl", [row])
    for format, expected in ((RowFormat.prompt_completion, {"prompt": "a", "completion": "b"}), (RowFormat.text, "c")):
        corpus = open_corpus(config_of(path, tmp_path, format=format))
        text = corpus.text(0)
        assert (text if format is RowFormat.text else json.loads(text)) == expected
    # What is read is part of what identifies it.
    one, other = (
        open_corpus(config_of(path, tmp_path, format=f)).fingerprint for f in (RowFormat.auto, RowFormat.text)
    )
    assert one != other


@pytest.mark.parametrize("kind", ["parquet", *OTHERS])
def test_a_file_of_no_format_is_refused_with_its_columns(kind, tmp_path, data):
    path = write(data, kind, [{"question": "a", "answer": "b"}])
    with pytest.raises(DataError, match="fit no format") as caught:
        open_corpus(config_of(path, tmp_path, kind))
    assert caught.value.found == "question, answer"
    assert "messages | conversations | instruction + output | prompt + completion | text" in caught.value.allowed


def test_preferences_are_sent_to_the_command_that_learns_from_them(tmp_path, data):
    path = write(data, "jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(DataError, match="fit no format") as caught:
        open_corpus(config_of(path, tmp_path))
    assert "hfdist tune task=dpo" in caught.value.hint


def test_columns_of_any_names_are_mapped_by_the_hint(tmp_path, data):
    path = write(data, "jsonl", [{"one": "a", "two": "b", "three": "c"}])
    for format, hint, settings in (
        (RowFormat.auto, "'data.columns={prompt: one, completion: two}'", {"prompt": "one", "completion": "two"}),
        (
            RowFormat.preference,
            "'data.columns={prompt: one, chosen: two, rejected: three}'",
            {"prompt": "one", "chosen": "two", "rejected": "three"},
        ),
    ):
        with pytest.raises(DataError) as caught:
            open_corpus(config_of(path, tmp_path, format=format))
        assert caught.value.hint.startswith(hint)
        assert open_corpus(config_of(path, tmp_path, format=format, columns=settings)).num_documents == 1


def test_rows_of_kto_are_sent_to_it(tmp_path, data):
    path = write(data, "jsonl", [{"prompt": "a", "completion": "b", "label": False}])
    with pytest.raises(DataError, match="columns are missing") as caught:
        open_corpus(config_of(path, tmp_path, format=RowFormat.preference))
    assert "hfdist kto" in caught.value.hint


BAD = {
    "no format": ({"question": "a"}, "fit no format", "question"),
    "no messages": ({"messages": []}, "the conversation is empty", None),
    "no role": ({"messages": [{"content": "a"}]}, r"no role: messages\[0\]", "{'content': 'a'}"),
    "no content": ({"messages": [{"role": "user"}]}, r"no content: messages\[0\]", "{'role': 'user'}"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "images than places",
        "images: 0; places: 1",
    ),
    "a sound beside text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "audio"}]}]},
        "neither text nor an image",
        "[{'type': 'text', 'text': 'a'}, {'type': 'audio'}]",
    ),
    "a number": ({"instruction": "a", "output": 3}, "no text: output", "3"),
    "a turn that is no pair": (
        {"instruction": "a", "output": "b", "history": ["ab"]},
        r"no pair: history\[0\]",
        "'ab'",
    ),
    "a weight": (
        {"conversations": [{"from": "gpt", "value": "m", "weight": 0.5}]},
        r"neither that a turn is learned.*conversations\[0\]",
        "0.5",
    ),
    "a speaker": ({"conversations": [{"from": "cat", "value": "m"}]}, r"speaker.*conversations\[0\]", "'cat'"),
    "a call": ({"conversations": [{"from": "function_call", "value": "f"}]}, "no JSON", "'f'"),
}


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.replace(" ", "-"))
def test_a_bad_row_is_named(case, tmp_path, data):
    row, message, found = BAD[case]
    path = write(data, "jsonl", [ROWS["messages"][0], row])
    (shard,) = [shard for _, shard in open_corpus(config_of(path, tmp_path)).shards]
    good, bad = shard.read([0, 1])
    assert isinstance(good, str)
    assert isinstance(bad, BadRow)
    assert bad.error.where == f"{path}/rows.jsonl, row 1"
    assert bad.error.found == found
    with pytest.raises(DataError, match=message):
        raise bad.error


def test_arguments_that_are_null_stay_and_are_said_once(data, tmp_path, caplog):
    called = {**CALLED, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": {"a": 1, "b": None}}}]}
    write_rows([{"messages": [USER, called]}] * 4, data / "rows.jsonl", 2)
    corpus = open_corpus(config_of(data, tmp_path))
    (kept,) = json.loads(corpus.text(0))["messages"][1]["tool_calls"]
    assert kept["function"]["arguments"] == {"a": 1, "b": None}
    assert caplog.text.count("arguments that are null") == 1
    assert str(data) in caplog.text


def test_values_that_json_does_not_have(tmp_path):
    reader = RowReader(format=RowFormat.auto)
    bad = reader.read({"messages": [{"role": "user", "content": "a", "at": object()}]}, where="f, row 3")
    assert isinstance(bad, BadRow)
    assert bad.error.where == "f, row 3"


def test_half_of_a_pair_is_replaced_as_in_plain_text():
    text = RowReader(format=RowFormat.auto).read({"text": "a\ud800"}, where="f")
    assert json.loads(text) == {"text": "a?"}


def test_the_tokenizer_of_a_model_without_one_learns_words_not_json(tmp_path, data):
    path = write(data, "jsonl", [ROWS["messages"][0], ROWS["prompt"][0]])
    corpus = open_corpus(config_of(path, tmp_path, eval_fraction=0, on_bad_rows=BadRows.error))
    assert sorted(corpus.training_texts(1000)) == ["Hi\nHello", '["a"]\nb']
