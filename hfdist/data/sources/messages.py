"""Messages of conversations in one canonical form, made of OpenAI's messages, ShareGPT's turns, or plain texts.

A canonical message has a role, and a content that is one text, or tool calls whose arguments are objects. No key of it
is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hfdist.data.sources.images import IMAGES, PLACE, image_of_part
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
"""Values of ShareGPT's `from` whose `value` is a tool call, or several, as JSON."""

Message = dict[str, object]


def chat_example(messages: Sequence[Message], row: Mapping[str, object]) -> dict[str, object]:
    """Give the example of a conversation, with the tools of its row; ContentError: no messages, or no tools."""
    if not messages:
        refuse("the conversation is empty", "messages", None, "a message or more")
    tools = parsed(without_nulls(row.get("tools")))
    if not tools:
        return {"messages": messages}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        refuse("these are no tools", "tools", tools, "a list of JSON schemas, or JSON of one")
    return {"messages": messages, "tools": [_wrapped_tool(tool) for tool in tools]}


def _wrapped_tool(tool: Message) -> Message:
    """Give a tool in OpenAI's envelope, which templates expect; rows may have the bare function."""
    is_bare = "name" in tool and "function" not in tool
    return {"type": "function", "function": tool} if is_bare else tool


def with_system(messages: Sequence[Message], row: Mapping[str, object]) -> Sequence[Message]:
    """Put the row's system message, if it has one, before messages that do not begin with one."""
    system = row.get("system")
    if not system or (messages and messages[0]["role"] == "system"):
        return messages
    return [{"role": "system", "content": text_of(system, "system")}, *messages]


def messages_of(value: object, role: str, part: str) -> list[Message]:
    """Give the canonical messages of a prompt or an answer, which may be JSON; a text is one message of `role`.

    `part` is the name of the column, for messages.
    """
    if not isinstance(value, str | list):
        refuse("this is neither a text nor a list of messages", part, value, "a text, or a list of messages")
    found = as_messages(value)
    items = found if isinstance(found, list) else [{"role": role, "content": found}]
    return [canonical_message(item, f"{part}[{n}]") for n, item in enumerate(items)]


def as_messages(value: object) -> object:
    """Give a list of messages, also of one that is written as JSON; any other value stays as it is."""
    found = parsed(value)
    if isinstance(found, list) and found and all(isinstance(item, dict) and "role" in item for item in found):
        return found
    return value


def canonical_message(item: object, part: str) -> Message:
    """Give a message of OpenAI's form in the canonical form; `part` names its place in messages."""
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
    """Give a turn of ShareGPT's form, or of OpenAI's, as a canonical message; `part` names its place in messages."""
    turn = item if isinstance(item, dict) else {}
    if "from" not in turn and "role" in turn:
        return canonical_message(turn, part)
    speaker = turn.get("from")
    if not isinstance(speaker, str) or speaker not in _ROLES:
        refuse("a turn has no speaker that is known", f"{part}.from", speaker, ", ".join(_ROLES))
    value = text_of(turn.get("value"), f"{part}.value")
    weight: Message = {}
    if turn.get("weight") is not None:
        _check_weight(turn, part)
        # A weight of 1 says no more than none: the row is then as one without weights.
        if turn["weight"] != 1:
            weight = {"weight": turn["weight"]}
    if speaker not in _CALLS:
        return {"role": _ROLES[speaker], "content": value, **weight}
    calls = parsed(value)
    if isinstance(calls, str):
        refuse("a function call is no JSON", f"{part}.value", value, '{"name": ..., "arguments": {...}}')
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [_call(call, part) for call in calls], **weight}


def has_null_arguments(value: object) -> bool:
    """Whether tool calls in a row have an argument that is null, which a table may have filled in."""
    if isinstance(value, dict):
        arguments = value.get("arguments")
        is_filled = isinstance(arguments, dict) and None in arguments.values()
        return is_filled or any(has_null_arguments(item) for item in value.values())
    return isinstance(value, list) and any(has_null_arguments(item) for item in value)


def _content(content: object, part: str) -> tuple[str, list[object]]:
    """Give the content of a message as one text, in which `PLACE` stands for an image, and the images of its parts."""
    if not isinstance(content, list):
        return _without_place(text_of(content, f"{part}.content"), part), []
    texts, images = [], []
    for piece in content:
        kind = piece.get("type") if isinstance(piece, dict) else None
        if kind == "text":
            texts.append(_without_place(text_of(piece.get("text"), f"{part}.content"), part))
        elif kind in ("image", "image_url"):
            texts.append(PLACE)
            image = image_of_part(piece)
            if image is not None:
                images.append(image)
        else:
            refuse("a part is neither text nor an image", f"{part}.content", content, "parts of type text or image")
    return "".join(texts), images


def _without_place(text: str, part: str) -> str:
    """Give a text that has no place for an image; ContentError: it has one, which could forge an image."""
    if PLACE in text:
        refuse("the text holds the private character that stands for an image", f"{part}.content", text, "any other")
    return text


def _call(item: object, part: str) -> Message:
    """Give a tool call in OpenAI's envelope; `item` may be the bare function."""
    call: dict[str, object] = item if isinstance(item, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        refuse("a tool call names no function", part, item, '{"function": {"name": ..., "arguments": {...}}}')
    # The nulls of arguments stay, since a call may pass null.
    arguments = function.get("arguments")
    function = without_nulls(function) | {"arguments": {} if arguments is None else parsed(arguments)}
    envelope: Message = without_nulls(call) if "function" in call else {"type": "function"}
    return envelope | {"function": function}


def _check_weight(message: Mapping[str, object], part: str) -> None:
    if message.get("weight", 1) not in (0, 1):
        refuse("a weight says neither that a turn is learned nor that it is not", part, message["weight"], "1 or 0")
