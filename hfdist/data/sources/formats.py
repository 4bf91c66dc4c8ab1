"""Formats of examples for fine-tuning: from the columns of a row to one canonical form.

An example is text, too: JSON of its canonical form. So digests, the held-out split, order, ledger and caches treat it
as they treat a document. The canonical forms are

{"text": ...}                                          plain text: every token is a target
{"prompt": ..., "completion": ...}                     text: the completion's tokens are targets
{"messages": [...], "tools": [...], "learned_from": n} a conversation as OpenAI writes it; assistant messages before
                                                       number n are no targets
{"messages": [...], "images": [{"digest", "size"}]}    the same with images: `images.PLACE` stands in its contents
{"query": ..., "documents": [...]}                     texts: a query, and the one that belongs to it before those that
                                                       do not; "ranked" in place of "documents": read with the query
{"text_a": ..., "text_b": ..., "score": n}             texts: how alike two are
{"text": ..., "text_pair": ..., "label": ...}          a text, or a pair, and its label: a name, a number, or a list
{"tokens": [...], "tags": [...]}                       words, and the label of each, null where it has none
{"source": ..., "target": ...}                         texts: what an encoder reads, and what a decoder writes of it

A preference is such a form with "rejected": of a text, the rejected completion; of a conversation, the messages that
stand in the place of those from number n on; or true, where there is this answer only, and it is rejected. A prompt
alone has an empty completion, or no message from number n on. With `data.keep_columns`, JSON of the columns that the
format does not read follows in a line of its own: `split_columns`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, takewhile
from typing import Any, NamedTuple, NoReturn

from hfdist.config.batch import IGNORED
from hfdist.config.data import NEGATIVES, RowFormat
from hfdist.data.sources.base import BadRow, ContentError, check_size, check_text
from hfdist.data.sources.images import COLUMNS as IMAGE_COLUMNS
from hfdist.data.sources.images import IMAGES, PLACE, ImageRules, WithImages, part_of, take_images

_ROLES: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function": "tool",
    "tool": "tool",
}
"""The role that each value of ShareGPT's `from` stands for."""
_CALLS = ("function_call", "tool_call")
_SHOWN_CHARACTERS = 80
_LONGEST_LABEL = 1000
"""Characters of a name: all names are in memory, and in the model's config."""
_NO_TAG = (None, IGNORED)
"""Tags of words whose label is not learned; the number is that of transformers' token classification."""


def from_text(row: Mapping[str, object]) -> dict[str, object]:
    """Plain text."""
    return {"text": _text(row["text"], "text")}


def _from_messages(row: Mapping[str, object]) -> dict[str, object]:
    """OpenAI's `messages`, with or without `tools`."""
    messages = _list(row["messages"], "messages")
    return _conversation([_message(item, f"messages[{n}]") for n, item in enumerate(messages)], row)


def _from_sharegpt(row: Mapping[str, object]) -> dict[str, object]:
    """ShareGPT's `conversations` of `from` and `value`."""
    items = _list(row["conversations"], "conversations")
    messages = [_from_value(item, f"conversations[{n}]") for n, item in enumerate(items)]
    return _conversation(_with_system(messages, row), row)


def _from_alpaca(row: Mapping[str, object]) -> dict[str, object]:
    """Alpaca's `instruction`, `input` and `output`, earlier turns in `history`; only the last answer is learned."""
    messages = []
    for n, turn in enumerate(_list(row.get("history") or [], "history")):
        if not isinstance(turn, list) or len(turn) != 2:
            _refuse("an earlier turn is no pair", f"history[{n}]", turn, "[instruction, output]")
        for role, text in zip(("user", "assistant"), turn, strict=True):
            messages.append({"role": role, "content": _text(text, f"history[{n}]")})
    asked = [_text(row[name], name) for name in ("instruction", "input") if row.get(name)]
    messages.append({"role": "user", "content": "\n".join(asked)})
    messages.append({"role": "assistant", "content": _text(row["output"], "output")})
    whole = _with_system(messages, row)
    return _conversation(whole, row) | ({"learned_from": len(whole) - 1} if row.get("history") else {})


def _from_prompt(row: Mapping[str, object]) -> dict[str, object]:
    """A prompt and its completion: both text, or either as messages."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return {"prompt": prompt, "completion": completion}
    for name in ("prompt", "completion"):
        _check_answer(row[name], name)
    prompt, completion = _as_messages(prompt), _as_messages(completion)
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _list(prompt, "prompt")
    answer = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    messages = [_message(item, f"prompt[{n}]") for n, item in enumerate(asked)]
    messages += [_message(item, f"completion[{n}]") for n, item in enumerate(_list(answer, "completion"))]
    return _conversation(messages, row) | {"learned_from": len(asked)}


def _from_preference(row: Mapping[str, object]) -> dict[str, object]:
    """A chosen and a rejected answer, with their prompt or with what both begin with as their prompt."""
    prompt, chosen, rejected = row.get("prompt"), row["chosen"], row["rejected"]
    _check_answer(rejected, "rejected")
    first = next(iter(chosen), None) if isinstance(chosen, list) else None
    if isinstance(prompt, str) and isinstance(first, dict) and first.get("role") in ("system", "user"):
        # Conversations that hold the prompt themselves.
        prompt = None
    if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str | None):
        if prompt is None:
            # The space belongs to the answers: tokenizers put it in front of a word.
            prompt = chosen[: _num_common(chosen, rejected)].rstrip(" ")
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        return {"prompt": prompt, "completion": chosen, "rejected": rejected}
    if prompt is None:
        chosen, rejected = _list(chosen, "chosen"), _list(rejected, "rejected")
        num_common = _num_common(chosen, rejected)
        prompt, chosen, rejected = chosen[:num_common], chosen[num_common:], rejected[num_common:]
    example = _from_prompt({**row, "prompt": prompt, "completion": chosen})
    rejected = _as_messages(rejected)
    if isinstance(rejected, str):
        return example | {"rejected": [{"role": "assistant", "content": rejected}]}
    return example | {"rejected": [_message(m, f"rejected[{n}]") for n, m in enumerate(_list(rejected, "rejected"))]}


def _check_answer(value: object, name: str) -> None:
    if not isinstance(value, str | list):
        _refuse("this is neither a text nor a list of messages", name, value, "a text, or a list of messages")


def _num_common(first: Sequence[object], second: Sequence[object]) -> int:
    """How many letters or messages both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _from_unpaired(row: Mapping[str, object]) -> dict[str, object]:
    """An answer that was liked or not."""
    if row["label"] not in (True, False):
        _refuse(
            "this says neither that the answer was liked nor that it was not", "label", row["label"], "true or false"
        )
    return _from_prompt(row) | ({} if row["label"] else {"rejected": True})


def _from_prompt_alone(row: Mapping[str, object]) -> dict[str, object]:
    """A prompt, as text or as messages."""
    prompt = _as_messages(row["prompt"])
    return _from_prompt({**row, "prompt": prompt, "completion": "" if isinstance(prompt, str) else []})


def _from_retrieval(row: Mapping[str, object]) -> dict[str, object]:
    """A query, the text that belongs to it, and texts that do not."""
    query = "query" if "query" in row else "anchor"
    positive = "positive" if "positive" in row else "pos"
    positives = _texts(row[positive], positive)
    if len(positives) != 1:
        _refuse("a row has one text that belongs to its query", positive, positives, "one text; a row for each other")
    negatives = [text for name in NEGATIVES if name in row for text in _texts(row[name], name)]
    return {"query": _written(row[query], query), "documents": [*positives, *negatives]}


def _from_ranking(row: Mapping[str, object]) -> dict[str, object]:
    """As `retrieval`."""
    example = _from_retrieval(row)
    return {"query": example["query"], "ranked": example["documents"]}


def _from_scored_pair(row: Mapping[str, object]) -> dict[str, object]:
    """Two texts, and how alike they are."""
    score = row["score"]
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        _refuse("this is no number", "score", score, "a number, such as 0.8")
    return {"text_a": _written(row["text_a"], "text_a"), "text_b": _written(row["text_b"], "text_b"), "score": score}


def _from_labelled(row: Mapping[str, object]) -> dict[str, object]:
    """A text or a pair, and its label."""
    label = row["label"]
    kept = [_label(item, f"label[{n}]") for n, item in enumerate(label)] if isinstance(label, list) else None
    example: dict[str, object] = {"text": _written(row["text"], "text")}
    if row.get("text_pair") is not None:
        example["text_pair"] = _written(row["text_pair"], "text_pair")
    return example | {"label": _label(label, "label") if kept is None else kept}


def _label(value: object, where: str) -> str | int | float:
    is_number = isinstance(value, int | float) and math.isfinite(value)
    if not is_number and not (isinstance(value, str) and 0 < len(value) <= _LONGEST_LABEL):
        allowed = f"a name of at most {_LONGEST_LABEL:,} characters, a number, or a list of them"
        _refuse("this is no label", where, value, allowed)
    assert isinstance(value, str | int | float)
    return int(value) if isinstance(value, bool) else value


def _from_tagged(row: Mapping[str, object]) -> dict[str, object]:
    """Words, each with its tag."""
    words = [_text(word, f"tokens[{n}]") for n, word in enumerate(_list(row["tokens"], "tokens"))]
    tags = _list(row["tags"], "tags")
    if len(words) != len(tags):
        _refuse("each word has one tag", "tags", f"{len(tags)}, of {len(words)} tokens", "as many as tokens")
    if not any(word.strip() for word in words):
        _refuse("the text is empty", "tokens", words, "words")
    return {
        "tokens": words,
        "tags": [None if tag in _NO_TAG else _label(tag, f"tags[{n}]") for n, tag in enumerate(tags)],
    }


def _from_source(row: Mapping[str, object]) -> dict[str, object]:
    """A source and its target."""
    source, target = ("source", "target") if "source" in row else ("prompt", "completion")
    return {"source": _written(row[source], source), "target": _written(row[target], target)}


def _texts(value: object, where: str) -> list[str]:
    """Some texts, or a single one."""
    if isinstance(value, str):
        return [_written(value, where)]
    return [_written(item, f"{where}[{number}]") for number, item in enumerate(_list(value, where))]


def _written(value: object, where: str) -> str:
    text = _text(value, where)
    if not text.strip():
        _refuse("the text is empty", where, text, "a text with letters")
    return text


def split_columns(text: str) -> tuple[str, str]:
    """Give an example, and JSON of the other columns of its row; nothing where they are not kept."""
    # JSON has no line ends of its own.
    example, _, columns = text.partition("\n")
    return example, columns


def texts_in(example: str) -> str:
    """All that is written in an example, for what wants text: its fields and messages, a line each."""
    values = json.loads(split_columns(example)[0])
    rejected = values.pop("rejected", [])
    messages = values.pop("messages", []) + (rejected if isinstance(rejected, list) else [])
    values["rejected"] = rejected
    lists = (values.get(name, []) for name in ("documents", "ranked", "tokens"))
    written = [value for value in chain(values.values(), *lists) if isinstance(value, str)]
    return "\n".join([*written, *(message["content"] for message in messages if "content" in message)])


def without_nulls(value: object) -> Any:
    """Without the keys that tables fill up: objects of a column have the keys of all rows."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def has_null_arguments(value: object) -> bool:
    """Whether a row of JSON has tool calls with an argument that is null: it may be meant, or filled up by a table."""
    if isinstance(value, dict):
        arguments = value.get("arguments")
        is_filled = isinstance(arguments, dict) and None in arguments.values()
        return is_filled or any(has_null_arguments(item) for item in value.values())
    return isinstance(value, list) and any(has_null_arguments(item) for item in value)


def _conversation(messages: Sequence[Mapping[str, object]], row: Mapping[str, object]) -> dict[str, object]:
    if not messages:
        _refuse("the conversation is empty", "messages", None, "a message or more")
    tools = _parsed(without_nulls(row.get("tools")))
    if not tools:
        return {"messages": messages}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        _refuse("these are no tools", "tools", tools, "a list of JSON schemas, or JSON of one")
    # Templates expect each inside the envelope that OpenAI gave them.
    is_bare = [("name" in tool and "function" not in tool) for tool in tools]
    wrapped = [{"type": "function", "function": t} if bare else t for t, bare in zip(tools, is_bare, strict=True)]
    return {"messages": messages, "tools": wrapped}


def _with_system(messages: Sequence[Mapping[str, object]], row: Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    system = row.get("system")
    if not system or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": _text(system, "system")}, *messages]


def _message(item: object, where: str) -> dict[str, object]:
    """A message without keys that are null, its content as one text, the arguments of its calls as objects."""
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        is_named_else = isinstance(item, dict) and "from" in item
        what = "a message has no role, but `from`, as turns of a column `conversations` have" if is_named_else else None
        _refuse(what or "a message has no role", where, item, '{"role": "user", "content": "..."}')
    message = {name: value for name, value in item.items() if value is not None and name != IMAGES}
    _check_weight(message, where)
    if "content" in message:
        message["content"], images = _content(message["content"], where)
        if images:
            message[IMAGES] = images
    elif not message.get("tool_calls"):
        instead = next((name for name in ("text", "value") if name in message), None)
        what = "a message has no content" if instead is None else f"a message has `{instead}` in place of `content`"
        _refuse(what, where, item, "content, or tool_calls of the assistant")
    if "tool_calls" in message:
        calls = _parsed(message["tool_calls"])
        message["tool_calls"] = [_call(call, where) for call in _list(calls, f"{where}.tool_calls")]
        if not message["tool_calls"]:
            del message["tool_calls"]
    return message


def _content(content: object, where: str) -> tuple[str, list[object]]:
    """One text, also where it comes in parts, and the images that parts bring; `PLACE` is where an image stands."""
    if not isinstance(content, list):
        return _no_place(_text(content, f"{where}.content"), where), []
    texts, images = [], []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            texts.append(_no_place(_text(part.get("text"), f"{where}.content"), where))
        elif kind in ("image", "image_url"):
            texts.append(PLACE)
            images += [ref for ref in [part_of(part)] if ref is not None]
        else:
            _refuse("a part is neither text nor an image", f"{where}.content", content, "parts of type text or image")
    return "".join(texts), images


def _no_place(text: str, where: str) -> str:
    if PLACE in text:
        _refuse("the text holds the private character that stands for an image", f"{where}.content", text, "any other")
    return text


def _call(given: object, where: str) -> dict[str, object]:
    call = given if isinstance(given, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse("a tool call names no function", where, given, '{"function": {"name": ..., "arguments": {...}}}')
    # The nulls of arguments stay: a call may say so.
    arguments = function.get("arguments")
    function = without_nulls(function) | {"arguments": {} if arguments is None else _parsed(arguments)}
    return (without_nulls(call) if "function" in call else {"type": "function"}) | {"function": function}


def _check_weight(turn: Mapping[str, object], where: str) -> None:
    if turn.get("weight", 1) not in (0, 1):
        _refuse("a weight says neither that a turn is learned nor that it is not", where, turn["weight"], "1 or 0")


def _from_value(given: object, where: str) -> dict[str, object]:
    item = given if isinstance(given, dict) else {}
    if "from" not in item and "role" in item:
        return _message(item, where)
    speaker = item.get("from")
    if not isinstance(speaker, str) or speaker not in _ROLES:
        _refuse("a turn has no speaker that is known", f"{where}.from", speaker, ", ".join(_ROLES))
    value = _text(item.get("value"), f"{where}.value")
    weight = {} if item.get("weight") is None else {"weight": item["weight"]}
    _check_weight(weight, where)
    # As a row without weights.
    weight = {} if weight == {"weight": 1} else weight
    if speaker not in _CALLS:
        return {"role": _ROLES[speaker], "content": value, **weight}
    calls = _parsed(value)
    if isinstance(calls, str):
        _refuse("a function call is no JSON", f"{where}.value", value, '{"name": ..., "arguments": {...}}')
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [_call(call, where) for call in calls], **weight}


def _parsed(value: object) -> object:
    """A list or an object, also where it comes as JSON; all else as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, list | dict) else value


def _as_messages(value: object) -> object:
    """Messages, also where they come as JSON; all else as it is: a text may be JSON of something else."""
    parsed = _parsed(value)
    if isinstance(parsed, list) and parsed and all(isinstance(item, dict) and "role" in item for item in parsed):
        return parsed
    return value


def _list(value: object, where: str) -> list[object]:
    value = _parsed(value)
    if not isinstance(value, list):
        _refuse("this is no list", where, value, "a list")
    return list(value)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        _refuse("this is no text", where, value, "a string")
    return str(value)


def _refuse(what: str, part: str, found: object, allowed: str) -> NoReturn:
    shown = None if found is None else f"{found!r:.{_SHOWN_CHARACTERS}}"
    raise ContentError(f"{what}: {part}", found=shown, allowed=allowed)


class RowColumns(NamedTuple):
    """Columns of a format, and how they become its canonical form."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Mapping[str, object]], dict[str, object]]
    """Takes the columns that a row has; ContentError, without its `where`: their values are of another form."""


FORMS: dict[RowFormat, RowColumns] = {
    RowFormat.messages: RowColumns(("messages",), ("tools", *IMAGE_COLUMNS), _from_messages),
    RowFormat.sharegpt: RowColumns(("conversations",), ("system", "tools", *IMAGE_COLUMNS), _from_sharegpt),
    RowFormat.alpaca: RowColumns(
        ("instruction", "output"), ("input", "system", "history", *IMAGE_COLUMNS), _from_alpaca
    ),
    RowFormat.prompt_completion: RowColumns(("prompt", "completion"), ("tools", *IMAGE_COLUMNS), _from_prompt),
}
"""Formats in the order in which `auto` tries them; plain text comes last."""
FORMS_BY_NAME = FORMS | {
    RowFormat.preference: RowColumns(("chosen", "rejected"), ("prompt", "tools", *IMAGE_COLUMNS), _from_preference),
    RowFormat.unpaired_preference: RowColumns(
        ("prompt", "completion", "label"), ("tools", *IMAGE_COLUMNS), _from_unpaired
    ),
    RowFormat.prompt: RowColumns(("prompt",), ("tools", *IMAGE_COLUMNS), _from_prompt_alone),
    RowFormat.retrieval: RowColumns(("query", "positive"), NEGATIVES, _from_retrieval),
    RowFormat.ranking: RowColumns(("query", "positive"), NEGATIVES, _from_ranking),
    RowFormat.scored_pair: RowColumns(("text_a", "text_b", "score"), (), _from_scored_pair),
    RowFormat.labelled: RowColumns(("text", "label"), ("text_pair",), _from_labelled),
    RowFormat.tagged: RowColumns(("tokens", "tags"), (), _from_tagged),
    RowFormat.source_target: RowColumns(("source", "target"), (), _from_source),
}
"""All formats that have columns of their own; `auto` tries those of `FORMS` alone."""
_QUERIES = (("anchor", "positive"), ("query", "pos"))
OTHER_NAMES = {
    RowFormat.retrieval: [RowColumns(needed, NEGATIVES, _from_retrieval) for needed in _QUERIES],
    RowFormat.ranking: [RowColumns(needed, NEGATIVES, _from_ranking) for needed in _QUERIES],
    RowFormat.source_target: [RowColumns(("prompt", "completion"), (), _from_source)],
}
"""The same formats as other libraries name their columns: sentence-transformers, FlagEmbedding, TRL."""


def write_example(form: RowColumns, row: Mapping[str, object], rules: ImageRules | None, where: str) -> str | BadRow:
    """Write a row with the columns of a format as JSON of its canonical form, with its images beside it.

    `rules` are those of its source, None: without images; `where` names the file and the row.
    """
    try:
        has_images = not set(IMAGE_COLUMNS).isdisjoint(form.optional)
        example, files = take_images(form.convert(row), row if has_images else {}, rules)
        # The order of keys stays: templates write tools as they find them.
        text = json.dumps(example, ensure_ascii=False)
    except ContentError as error:
        error.where = where
        return BadRow(error)
    # Values that JSON does not have, such as times; and too deep a nesting.
    except (TypeError, ValueError, RecursionError) as error:
        return BadRow(ContentError(f"the row cannot be read as an example: {error}", where=where))
    checked = check_size(len(text), where=where) or check_text(text, where=where)
    if not files or isinstance(checked, BadRow):
        return checked
    return WithImages.of(checked, files)
