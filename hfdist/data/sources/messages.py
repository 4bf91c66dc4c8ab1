"""Messages of a conversation in one canonical form: from OpenAI's messages, ShareGPT's turns, or a text with its role.

A message has a role, and a content that is one text, or tool calls whose arguments are objects; no key of it is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hfdist.data.sources.images import IMAGES, PLACE, part_of
from hfdist.data.sources.values import list_of, parsed, refuse, text_of, without_nulls

_SPEAKERS = {
    "system": ("system",),
    "user": ("human", "user"),
    "assistant": ("gpt", "assistant", "model", "chatgpt", "bing", "bard", "function_call", "tool_call"),
    "tool": ("observation", "function_response", "tool_response", "function", "tool"),
}
_ROLES = {speaker: role for role, speakers in _SPEAKERS.items() for speaker in speakers}
"""The role that each value of ShareGPT's `from` stands for."""
_CALLS = ("function_call", "tool_call")

Message = dict[str, object]


def chat_example(messages: Sequence[Message], row: Mapping[str, object]) -> dict[str, object]:
    """Give an example of messages, with the tools of its row."""
    if not messages:
        refuse("the conversation is empty", "messages", None, "a message or more")
    tools = parsed(without_nulls(row.get("tools")))
    if not tools:
        return {"messages": messages}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        refuse("these are no tools", "tools", tools, "a list of JSON schemas, or JSON of one")
    # Templates expect each inside the envelope that OpenAI gave them.
    is_bare = [("name" in tool and "function" not in tool) for tool in tools]
    wrapped = [{"type": "function", "function": t} if bare else t for t, bare in zip(tools, is_bare, strict=True)]
    return {"messages": messages, "tools": wrapped}


def with_system(messages: Sequence[Message], row: Mapping[str, object]) -> Sequence[Message]:
    """Put the system message of a row, if it has one, before messages that begin without."""
    system = row.get("system")
    if not system or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": text_of(system, "system")}, *messages]


def messages_of(value: object, role: str, part: str) -> list[Message]:
    """Give the messages of a prompt or an answer, also where they come as JSON; a text is one message of a role."""
    if not isinstance(value, str | list):
        refuse("this is neither a text nor a list of messages", part, value, "a text, or a list of messages")
    found = as_messages(value)
    items = found if isinstance(found, list) else [{"role": role, "content": found}]
    return [canonical_message(item, f"{part}[{n}]") for n, item in enumerate(items)]


def as_messages(value: object) -> object:
    """Give messages, also where they come as JSON; all else as it is: a text may be JSON of something else."""
    found = parsed(value)
    if isinstance(found, list) and found and all(isinstance(item, dict) and "role" in item for item in found):
        return found
    return value


def canonical_message(item: object, part: str) -> Message:
    """Give a message of OpenAI's form in the canonical one."""
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        what = "a message has no role"
        if isinstance(item, dict) and "from" in item:
            what = f"{what}, but `from`, as turns of a column `conversations` have"
        refuse(what, part, item, '{"role": "user", "content": "..."}')
    message = {name: value for name, value in item.items() if value is not None and name != IMAGES}
    _check_weight(message, part)
    if "content" in message:
        message["content"], images = _content(message["content"], part)
        if images:
            message[IMAGES] = images
    elif not message.get("tool_calls"):
        instead = next((name for name in ("text", "value") if name in message), None)
        what = "a message has no content" if instead is None else f"a message has `{instead}` in place of `content`"
        refuse(what, part, item, "content, or tool_calls of the assistant")
    if "tool_calls" in message:
        message["tool_calls"] = [_call(call, part) for call in list_of(message["tool_calls"], f"{part}.tool_calls")]
        if not message["tool_calls"]:
            del message["tool_calls"]
    return message


def canonical_turn(item: object, part: str) -> Message:
    """Give the message that a turn of ShareGPT's form says; it may have OpenAI's form already."""
    turn = item if isinstance(item, dict) else {}
    if "from" not in turn and "role" in turn:
        return canonical_message(turn, part)
    speaker = turn.get("from")
    if not isinstance(speaker, str) or speaker not in _ROLES:
        refuse("a turn has no speaker that is known", f"{part}.from", speaker, ", ".join(_ROLES))
    value = text_of(turn.get("value"), f"{part}.value")
    weight = {} if turn.get("weight") is None else {"weight": turn["weight"]}
    _check_weight(weight, part)
    # A weight of 1 says no more than none: the row is then as one without weights.
    weight = {} if weight == {"weight": 1} else weight
    if speaker not in _CALLS:
        return {"role": _ROLES[speaker], "content": value, **weight}
    calls = parsed(value)
    if isinstance(calls, str):
        refuse("a function call is no JSON", f"{part}.value", value, '{"name": ..., "arguments": {...}}')
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [_call(call, part) for call in calls], **weight}


def has_null_arguments(value: object) -> bool:
    """Whether a row of JSON has tool calls with an argument that is null: it may be meant, or filled up by a table."""
    if isinstance(value, dict):
        arguments = value.get("arguments")
        is_filled = isinstance(arguments, dict) and None in arguments.values()
        return is_filled or any(has_null_arguments(item) for item in value.values())
    return isinstance(value, list) and any(has_null_arguments(item) for item in value)


def _content(content: object, part: str) -> tuple[str, list[object]]:
    """Give one text, also where it comes in parts, and what the parts say of images; `PLACE` stands for an image."""
    if not isinstance(content, list):
        return _without_place(text_of(content, f"{part}.content"), part), []
    texts, images = [], []
    for piece in content:
        kind = piece.get("type") if isinstance(piece, dict) else None
        if kind == "text":
            texts.append(_without_place(text_of(piece.get("text"), f"{part}.content"), part))
        elif kind in ("image", "image_url"):
            texts.append(PLACE)
            image = part_of(piece)
            images += [] if image is None else [image]
        else:
            refuse("a part is neither text nor an image", f"{part}.content", content, "parts of type text or image")
    return "".join(texts), images


def _without_place(text: str, part: str) -> str:
    if PLACE in text:
        refuse("the text holds the private character that stands for an image", f"{part}.content", text, "any other")
    return text


def _call(item: object, part: str) -> Message:
    """Give a tool call, with or without OpenAI's envelope, in the envelope."""
    call: dict[str, object] = item if isinstance(item, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        refuse("a tool call names no function", part, item, '{"function": {"name": ..., "arguments": {...}}}')
    # The nulls of arguments stay: a call may say so.
    arguments = function.get("arguments")
    function = without_nulls(function) | {"arguments": {} if arguments is None else parsed(arguments)}
    return (without_nulls(call) if "function" in call else {"type": "function"}) | {"function": function}


def _check_weight(message: Mapping[str, object], part: str) -> None:
    if message.get("weight", 1) not in (0, 1):
        refuse("a weight says neither that a turn is learned nor that it is not", part, message["weight"], "1 or 0")
