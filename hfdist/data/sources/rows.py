"""What a source reads of a row: a column of text, or the columns of an example for fine-tuning.

An example is text, too: JSON of its canonical form. So digests, the held-out split, order, ledger and caches treat it
as they treat a document. The canonical forms are

{"text": ...}                                          plain text: every token is a target
{"prompt": ..., "completion": ...}                     text: the completion's tokens are targets
{"messages": [...], "tools": [...], "learned_from": n} a conversation as OpenAI writes it; assistant messages before
                                                       number n are no targets

A preference is such a form with "rejected": of a text, the rejected completion; of a conversation, the messages that
stand in the place of those from number n on; or true, where there is this answer only, and it is rejected. A prompt
alone has an empty completion, or no message from number n on. With `data.keep_columns`, JSON of the columns that the
format does not read follows in a line of its own: `split_columns`.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple, NoReturn

from hfdist.config.data import DataConfig, RowFormat, SourceConfig
from hfdist.data.sources.base import BadRow, ContentError, check_size, check_text
from hfdist.data.sources.columns import TEXT, Column, Kind, guess_columns, kinds_of
from hfdist.errors import nearest

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
_SHOWN_COLUMNS = 40


def _from_text(row: Mapping[str, object]) -> dict[str, object]:
    """Plain text. Here and below, a row of another form raises ContentError; the caller sets its `where`."""
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
    written = [value for value in values.values() if isinstance(value, str)]
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
    message = {name: value for name, value in item.items() if value is not None}
    _check_weight(message, where)
    if "content" in message:
        message["content"] = _content(message["content"], where)
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


def _content(content: object, where: str) -> str:
    """One text, also where it comes in parts."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(_text(part.get("text"), f"{where}.content") for part in content)
    if isinstance(content, list):
        _refuse(
            "models learn from text alone, and a part is no text", f"{where}.content", content, "parts of type text"
        )
    return _text(content, f"{where}.content")


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
    is_conversation = isinstance(parsed, list) and parsed and all(isinstance(item, dict) for item in parsed)
    return parsed if is_conversation else value


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


class _Form(NamedTuple):
    """Columns of a format."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Mapping[str, object]], dict[str, object]]


_FORMS: dict[RowFormat, _Form] = {
    RowFormat.messages: _Form(("messages",), ("tools",), _from_messages),
    RowFormat.sharegpt: _Form(("conversations",), ("system", "tools"), _from_sharegpt),
    RowFormat.alpaca: _Form(("instruction", "output"), ("input", "system", "history"), _from_alpaca),
    RowFormat.prompt_completion: _Form(("prompt", "completion"), ("tools",), _from_prompt),
}
"""Formats in the order in which `auto` tries them; plain text comes last."""
_FORMS_BY_NAME = _FORMS | {
    RowFormat.preference: _Form(("chosen", "rejected"), ("prompt", "tools"), _from_preference),
    RowFormat.unpaired_preference: _Form(("prompt", "completion", "label"), ("tools",), _from_unpaired),
    RowFormat.prompt: _Form(("prompt",), ("tools",), _from_prompt_alone),
}
_NAMED = {format: form.needed for format, form in _FORMS_BY_NAME.items()} | {
    RowFormat.auto: _FORMS[RowFormat.prompt_completion].needed,
    RowFormat.preference: ("prompt", "chosen", "rejected"),
}
"""What the hint says of columns whose names tell nothing, in their order."""
_NUMBERS = ("id", "idx", "index")
_NO_TEXTS = (*_NUMBERS, "url", "source", "time", "timestamp", "date", "created", "label", "language", "lang", "uuid")
_TEXT_COLUMNS = ("content", "body", "raw_text", "raw_content", "document", "article", "passage", "story", "code")
"""Columns that hold the text in many datasets."""
_TAKES_TEXT = "rows of text: hfdist tokenizes them itself; in Python, hfdist.Trainer takes rows of input_ids and labels"


@dataclass(frozen=True)
class RowReader:
    """Reads the rows of one source: `text` is the column of plain text, `section` of the config is for messages."""

    text: Column = TEXT
    format: RowFormat = RowFormat.text
    section: str = "data.sources.NAME"
    mapped: tuple[tuple[str, Column], ...] = ()
    """Columns of formats that have another name in the rows."""
    columns_key: str = "data.columns"
    """Where the config says so."""
    keeps_columns: bool = False
    """Whether examples hold what their format does not read, too."""

    @classmethod
    def of(cls, source: SourceConfig, data: DataConfig, section: str) -> RowReader:
        """Make the reader of a source; what it does not say, `data.format` and `data.columns` do."""
        mapped = {name: Column.of(paths) for name, paths in (source.columns or data.columns).items()}
        text = mapped.pop("text", TEXT)
        if source.text != "text" and "text" not in source.columns:
            text = Column.of(source.text)
        key = f"{section}.columns" if source.columns else cls.columns_key
        others = (source.format or data.format, section, tuple(sorted(mapped.items())), key)
        return cls(text, *others, keeps_columns=bool(data.keep_columns))

    @property
    def gives_examples(self) -> bool:
        """Whether rows become examples in canonical JSON, and not plain text."""
        return self.format is not RowFormat.text

    @property
    def key(self) -> str:
        """Part of the identity of what is read: of plain text, its column."""
        text = self.text.paths[0] if len(self.text.paths) == 1 else list(self.text.paths)
        mapped = [{name: column.paths for name, column in self.mapped}] if self.mapped else []
        if self.gives_examples or not isinstance(text, str):
            return json.dumps([self.format.value, text, *mapped])
        return text

    def columns(self, present: Mapping[str, Kind], *, where: str) -> list[str]:
        """Give those of the columns that are read; ContentError where they fit no format that is allowed.

        `present` says of each column what its values are, for what the error proposes.
        """
        if not self.gives_examples:
            if not (places := self.text.places(present)):
                raise self._no_text(present, where)
            return list(dict.fromkeys(place[0] for place in places))
        held = {name: [name] for name in present}
        missing: ContentError | None = None
        for name, column in self._named:
            held.pop(name, None)
            if places := column.places(present):
                held[name] = [place[0] for place in places]
            elif name != "text":
                what, allowed = f"there is no column {column} for {name}", ", ".join(present)
                hint = nearest(column.paths[0], present, f"{self.columns_key}.{name}={{}}", cutoff=0.0)
                missing = missing or ContentError(what, where=where, allowed=allowed, hint=hint)
        fitting = [form for form in self._forms if set(form.needed) <= held.keys()]
        if not fitting or (missing is not None and self.columns_key != RowReader.columns_key):
            raise missing or self._no_format(present, where)
        if self.keeps_columns:
            return list(present)
        wanted = {one for form in fitting for name in (*form.needed, *form.optional) for one in held.get(name, ())}
        return [name for name in present if name in wanted]

    def read(self, row: Mapping[str, object], *, where: str) -> str | BadRow:
        """Give a row, with its columns as JSON has them, as text; `where` names the file and the row."""
        if not self.gives_examples:
            text = self.text.value(row)
            if text is None and not self.text.places(row):
                return BadRow(self._no_text(kinds_of([row]), where, is_row=True))
            return check_text(text, where=where)
        # Files that hold rows of several formats have null where a row has no such column.
        values = {**row, **{name: column.value(row) for name, column in self._named}} if self._named else row
        present = {name: value for name, value in values.items() if value is not None}
        for form in self._forms:
            if set(form.needed) <= set(present):
                example = _canonical(form, present, where)
                is_kept = self.keeps_columns and isinstance(example, str)
                return f"{example}\n{self._others(form, row)}" if is_kept else example
        # Only what the row itself has, and not a name of the config.
        empty = [
            name for form in self._forms if set(form.needed) <= set(row) for name in form.needed if row[name] is None
        ]
        if empty:
            return BadRow(ContentError(f"the row has no value in `{empty[0]}`", where=where, found="null"))
        return BadRow(self._no_format(kinds_of([present]), where, is_row=True))

    def _others(self, form: _Form, row: Mapping[str, object]) -> str:
        """Write what the format does not read of a row, if JSON has it."""
        named, wanted = dict(self._named), (*form.needed, *form.optional)
        used = {place[0] for name in wanted for place in named.get(name, Column((name,))).places(row)}
        parts = {name: _as_json(value) for name, value in row.items() if name not in used and value is not None}
        written = (f"{json.dumps(name)}: {value}" for name, value in parts.items() if value is not None)
        return check_text(f"{{{', '.join(written)}}}", where="")  # type: ignore[return-value]  # it is a text

    # Read for each row.
    @cached_property
    def _forms(self) -> list[_Form]:
        if self.format is not RowFormat.auto:
            return [_FORMS_BY_NAME[self.format]]
        forms = [*_FORMS.values(), _Form(("text",), (), _from_text)]
        names = {name for name, _ in self.mapped}
        # Who names a column means a format that has it.
        return sorted(forms, key=lambda form: names.isdisjoint((*form.needed, *form.optional)))

    @cached_property
    def _named(self) -> tuple[tuple[str, Column], ...]:
        """The columns that the config names."""
        return self.mapped if self.text == TEXT else (("text", self.text), *self.mapped)

    def _no_text(self, present: Mapping[str, Kind], where: str, *, is_row: bool = False) -> ContentError:
        # Other rows of the file have the column.
        # Where it was named, or other rows have it, it is one of several.
        is_one = is_row or self.text != TEXT
        texts = [column for column, kind in present.items() if kind is Kind.text]
        free = [column for column in texts if column not in _NO_TEXTS and len(column) > 1] or texts
        likely = [column for column in _TEXT_COLUMNS if column in free]
        column = nearest(self.text.paths[0], likely[:1] or free, cutoff=0.0)
        hint = None if column is None else self.name_texts([column], has_asked=is_one)
        if "input_ids" in present:
            column, hint = None, _TAKES_TEXT
        elif set(_FORMS_BY_NAME[RowFormat.preference].needed) <= set(present):
            as_text = f"; as text: {self.section}.text=chosen" if present["chosen"] is Kind.text else ""
            column, hint = None, f"hfdist dpo learns from preferences{as_text}"
        elif any(set(form.needed) <= set(present) for form in _FORMS.values()):
            as_text = "" if hint is None else f"; as text: {hint}"
            column, hint = None, f"hfdist finetune learns from conversations, with the same model and data{as_text}"
        what, allowed = f"there is no column {self.text}", ", ".join(present)
        return ContentError(what, where=where, allowed=allowed, hint=hint, text_column=column)

    def name_texts(self, columns: Iterable[str], *, has_asked: bool) -> str:
        """Write the override that names the text columns of several files; `has_asked`: one has what is asked for."""
        names = dict.fromkeys([*(self.text.paths if has_asked else ()), *columns])
        key = f"{self.section}.text"
        quoted = [
            name if re.fullmatch(r"[\w.-]+", name, re.ASCII) else json.dumps(name, ensure_ascii=False) for name in names
        ]
        value = f"[{','.join(quoted)}]" if len(quoted) > 1 else quoted[0]
        return shlex.quote(f"{key}={value}")

    def _mapping(self, found: Mapping[str, str]) -> str:
        """Propose columns; pairs that may be of a chat are proposed as turns, too."""
        pairs = ", ".join(f"{name}: {column}" for name, column in found.items())
        hint = f"'{self.columns_key}={{{pairs}}}' if these columns hold them"
        if self.format is RowFormat.auto and found.keys() == {"prompt", "completion"}:
            turns = f"{{instruction: {found['prompt']}, output: {found['completion']}}}"
            hint = f"{hint}; '{self.columns_key}={turns}' makes them turns of a chat"
        return hint

    def _no_format(self, present: Mapping[str, Kind], where: str, *, is_row: bool = False) -> ContentError:
        allowed = " | ".join(" + ".join(form.needed) for form in self._forms)
        column = next((name for name, kind in present.items() if kind is Kind.text), None)
        as_text = ""
        if column is not None:
            named = self.name_texts([column], has_asked=False)
            as_text = f"{self.section}.format=text {named} reads it, where it is plain text"
        missing = [name for name in _NAMED[self.format] if name not in present]
        others = [column for column in present if column not in (*_NAMED[self.format], *_NUMBERS)]
        free = [column for column in others if present[column] in (Kind.text, Kind.turns)]
        if "input_ids" in present:
            hint = _TAKES_TEXT
        elif self.format is RowFormat.auto and set(_FORMS_BY_NAME[RowFormat.preference].needed) <= set(present):
            hint = "hfdist tune task=dpo learns from preferences, with the same model and data"
        elif self.format is RowFormat.unpaired_preference and set(_NAMED[RowFormat.preference]) <= set(present):
            hint = "hfdist dpo learns from such rows, and hfdist reward; kto has one answer a row, and its label"
        elif self.format is RowFormat.preference and set(_NAMED[RowFormat.unpaired_preference]) <= set(present):
            hint = "hfdist kto learns from such rows; dpo and reward compare a chosen answer with a rejected one"
        elif found := next(
            filter(None, (guess_columns(form.needed, form.optional, present) for form in self._forms)), None
        ):
            hint = self._mapping(found)
        elif self.keeps_columns and "prompt" in present:
            named = f"'{self.columns_key}={{completion: COLUMN}}' names the answers"
            hint = f"{named}; data.format=prompt, where rewards need none"
        elif self.format is RowFormat.preference and any(set(form.needed) <= set(present) for form in _FORMS.values()):
            hint = "hfdist sft learns from such rows; dpo and reward compare a chosen answer with a rejected one"
        elif "messages" in present and missing == ["prompt", "completion"] and len(free) == 2:
            # Messages that end with a question, and its answer.
            hint = self._mapping({"prompt": "messages", "completion": next(one for one in free if one != "messages")})
        elif "messages" in present and missing[:1] == ["prompt"]:
            # What is asked, and the answer that is compared: a list of messages each.
            hint = 'rows such as {"prompt": messages[:-1], "completion": messages[-1:]}'
        # Of a row, columns without a value are not here.
        elif len(free) >= len(missing) > 0 and "label" not in missing and not is_row:
            hint = self._mapping(dict(zip(missing, free, strict=False)))
            hint = f"{hint}; {as_text}" if self.format is RowFormat.auto and as_text else hint
        else:
            rows = f"rows with {' and '.join(missing)}" + (", which is true or false" if "label" in missing else "")
            hint = as_text if self.format is RowFormat.auto and as_text else rows
        return ContentError(
            "the columns fit no format of examples" if self.format is RowFormat.auto else "columns are missing",
            where=where,
            found=", ".join(list(present)[:_SHOWN_COLUMNS]) or "no column with a value",
            allowed=allowed,
            hint=hint,
        )


def _canonical(form: _Form, row: Mapping[str, object], where: str) -> str | BadRow:
    try:
        # The order of keys stays: templates write tools as they find them.
        text = json.dumps(form.convert(row), ensure_ascii=False)
    except ContentError as error:
        error.where = where
        return BadRow(error)
    # Values that JSON does not have, such as times; and too deep a nesting.
    except (TypeError, ValueError, RecursionError) as error:
        return BadRow(ContentError(f"the row cannot be read as an example: {error}", where=where))
    checked = check_text(text, where=where)
    return check_size(len(text), where=where) or checked


def _as_json(value: object) -> str | None:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None
