"""Calls of tools: what a model writes is a call, or is said to be none; nothing of it raises."""

from typing import Optional

import pytest

from hfdist.environments.tools import Call, as_call, describe_tools, do_call, find_calls
from hfdist.errors import ConfigError


def add(first: int, second: float = 1.0, note: Optional[str] = None) -> dict:  # noqa: UP045  # as transformers reads it
    """Add two numbers.

    Args:
        first: A whole number.
        second: A number.
        note: A word.
    """
    return {"sum": first + second}


TOOLS = {"add": add}
SCHEMAS = {schema["function"]["name"]: schema for schema in describe_tools([add], where="key", found="name")}


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("no call", []),
        ('<tool_call>{"name": "add", "arguments": {"first": 2}}</tool_call>', [Call("add", {"first": 2})]),
        (
            'First\n<tool_call>\n{"name": "add", "arguments": "{\\"first\\": 2}"}\n</tool_call> and '
            '<tool_call>{"name": "b"}</tool_call>',
            [Call("add", {"first": 2}), Call("b", {})],
        ),
        ("<tool_call>{'name': 'add'}</tool_call>", [Call("", {})]),
        # Looked for from each beginning, this takes minutes.
        ("</tool_call>" + "<tool_call>" * 100_000, []),
        ('<tool_call>{"name": 5, "arguments": {}}</tool_call>', [Call("", {})]),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', [Call("", {})]),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", [Call("", {})]),
        ('<tool_call>{"name": "add", "arguments": {}}', []),
        # Half of a surrogate pair has no bytes.
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', [Call("", {})]),
        ('<tool_call>{"name": "add", "arguments": {"\\ud800": 1}}</tool_call>', [Call("", {})]),
        ('<tool_call>{"name": "add", "arguments": {"note": "\\ud800"}}</tool_call>', [Call("", {})]),
    ],
)
def test_calls_in_a_text(text, calls):
    assert find_calls(text) == calls


def test_a_call_as_openai_writes_it():
    assert as_call({"type": "function", "function": {"name": "add", "arguments": {"first": 1}}}) == Call(
        "add", {"first": 1}
    )


@pytest.mark.parametrize(
    ("call", "result"),
    [
        (Call("add", {"first": 2}), '{"sum": 3.0}'),
        (Call("add", {"first": 2, "second": 3, "note": None}), '{"sum": 5}'),
        (Call("", {}), 'error: a call is {"name": NAME, "arguments": {...}}'),
        (Call("eval", {}), "error: there is no such tool; there are: add"),
        (Call("add", {}), "error: missing a required argument: 'first'"),
        (Call("add", {"first": 2, "third": 3}), "error: got an unexpected keyword argument 'third'"),
        (Call("add", {"first": "2"}), "error: the argument first must be of type integer"),
        (Call("add", {"first": True}), "error: the argument first must be of type integer"),
    ],
)
def test_the_model_reads_what_is_wrong_with_its_call(call, result):
    assert do_call(call, TOOLS, SCHEMAS) == result


def test_a_tool_without_a_description_is_refused():
    def silent(first):
        return first

    with pytest.raises(ConfigError, match="the tool silent cannot be offered") as caught:
        describe_tools([silent], where="task.environment", found="mine")
    assert caught.value.where == "task.environment"
